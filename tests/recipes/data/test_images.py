"""Image sources: a folder, planted synthetic images."""

from __future__ import annotations

import builtins
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.data import image_folder, synthetic_images
from recipes.data.errors import DataError
from recipes.data.records import Batch, Dataset
from recipes.schema.data import ImageFolderConfig, SyntheticImagesConfig


def whole(dataset: Dataset, epoch: int = 0) -> Batch:
    return dataset.batch(range(len(dataset)), epoch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten images of each of two classes; left halves are black, right halves of the class's colour."""
    for name, colour in (("green", (0, 255, 0)), ("red", (255, 0, 0))):
        for number in range(10):
            image = np.zeros((40, 60, 3), dtype=np.uint8)
            image[:, 30:] = colour
            path = tmp_path / "images" / name / f"{number}.{'png' if number % 2 else 'bmp'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    (tmp_path / "images" / "red" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def config(folder: Path, **changes: object) -> ImageFolderConfig:
    return ImageFolderConfig(path=str(folder), **{"eval_fraction": 0.2, **changes})  # type: ignore[arg-type]


class TestFolder:
    def test_facts_and_shapes(self, make_request, folder: Path) -> None:
        splits = image_folder.prepare(config(folder), make_request("images", image_size=20))
        info = splits.info
        assert (info.task, info.num_classes, info.image_size) == ("images", 2, 20)
        assert (len(splits.train), len(splits.eval), info.num_train, info.num_eval) == (16, 4, 16, 4)
        batch = whole(splits.eval)
        assert batch["pixels"].shape == (4, 3, 20, 20) and batch["pixels"].dtype == torch.float32
        assert batch["pixels"].is_contiguous() and batch["labels"].dtype == torch.int64

    def test_colours_arrive_where_they_were(self, make_request, folder: Path) -> None:
        splits = image_folder.prepare(config(folder), make_request("images", image_size=20))
        batch = whole(splits.eval)
        for pixels, label in zip(batch["pixels"], batch["labels"].tolist(), strict=True):
            colour = 1 - label  # class 0 is green, channel 1; class 1 is red, channel 0
            assert pixels[colour, :, 15:].mean() > 2 and pixels[colour, :, :5].mean() < -1.5

    def test_training_images_are_mirrored_by_seed_and_epoch(self, make_request, folder: Path) -> None:
        splits = image_folder.prepare(config(folder), make_request("images", image_size=20))

        def is_mirrored(epoch: int) -> torch.Tensor:
            pixels = whole(splits.train, epoch)["pixels"].sum(dim=1)
            return pixels[:, :, 2].sum(dim=1) > pixels[:, :, -2].sum(dim=1)

        assert is_mirrored(0).equal(is_mirrored(0)) and not is_mirrored(0).equal(is_mirrored(1))
        assert 0 < int(is_mirrored(0).sum()) < 16
        assert whole(splits.eval, 0)["pixels"].equal(whole(splits.eval, 1)["pixels"])

    def test_a_file_keeps_its_split_when_others_are_added(self, make_request, folder: Path) -> None:
        request = make_request("images", image_size=20)
        first = image_folder.prepare(config(folder), request).eval
        for number in range(10, 15):
            (folder / "red" / f"{number}.png").write_bytes((folder / "red" / "1.png").read_bytes())
        second = image_folder.prepare(config(folder), request).eval
        assert isinstance(first, image_folder.ImageFiles) and isinstance(second, image_folder.ImageFiles)
        assert len(set(first._paths) & set(second._paths)) >= 2

    def test_an_unreadable_image_is_named(self, make_request, folder: Path) -> None:
        (folder / "red" / "3.png").write_bytes(b"no image")
        splits = image_folder.prepare(config(folder, eval_fraction=0.0), make_request("images", image_size=20))
        with pytest.raises(DataError, match=r"red/3\.png: not a readable image"):
            whole(splits.train)

    @pytest.mark.parametrize(
        ("below", "message"),
        [("red", "at least two; its sub-folders are: none"), ("red/1.png", "is a file"), ("blue", "no such file")],
    )
    def test_other_places(self, make_request, folder: Path, below: str, message: str) -> None:
        with pytest.raises(DataError, match=message):
            image_folder.prepare(config(folder / below), make_request("images", image_size=20))

    def test_a_class_without_images(self, make_request, folder: Path) -> None:
        (folder / "blue").mkdir()
        with pytest.raises(DataError, match=r"blue: no \.jpg.*it holds no files"):
            image_folder.prepare(config(folder), make_request("images", image_size=20))

    def test_without_pillow(self, make_request, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = builtins.__import__

        def without(name: str, *args: object, **kwargs: object) -> object:
            if name == "PIL":
                raise ImportError(name)
            return real(name, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(DataError, match=r"pip install 'fsdp-launcher\[images\]'"):
            image_folder.prepare(config(folder), make_request("images", image_size=20))


class TestSynthetic:
    def test_facts_and_shapes(self, make_request) -> None:
        splits = synthetic_images.prepare(SyntheticImagesConfig(num_samples=100), make_request("images", image_size=16))
        assert (splits.info.num_classes, splits.info.image_size) == (10, 16)
        assert "SYNTHETIC" in splits.info.description
        batch = whole(splits.train)
        assert batch["pixels"].shape == (100, 3, 16, 16) and batch["pixels"].dtype == torch.float32
        assert set(batch["labels"].tolist()) == set(range(10))
        assert float(batch["pixels"].std()) == pytest.approx((1 + 0.7**2) ** 0.5, abs=0.05)

    def test_a_sample_is_the_same_everywhere(self, make_request) -> None:
        splits = synthetic_images.prepare(SyntheticImagesConfig(), make_request("images", image_size=16))
        several, alone = splits.train.batch([4, 9_999], 0), splits.train.batch([9_999], 5)
        assert several["pixels"][1].equal(alone["pixels"][0]) and several["labels"][1] == alone["labels"][0]
        assert not alone["pixels"][0].equal(splits.eval.batch([0], 0)["pixels"][0])

    def test_classes_can_be_told_apart(self, make_request) -> None:
        """By the nearest amplitude spectrum, which shifts leave alone."""
        splits = synthetic_images.prepare(SyntheticImagesConfig(), make_request("images", image_size=16))
        train, held_out = splits.train.batch(range(500), 0), whole(splits.eval)
        spectra = [torch.fft.fft2(batch["pixels"]).abs().flatten(1) for batch in (train, held_out)]
        means = torch.stack([spectra[0][train["labels"] == label].mean(dim=0) for label in range(10)])
        found = torch.cdist(spectra[1], means).argmin(dim=1)
        assert float((found == held_out["labels"]).float().mean()) > 0.9


@pytest.mark.parametrize(
    ("changes", "request_size", "message"),
    [
        ({"image_size": 32}, 64, r"data.image_size=32 differs from model.image_size=64"),
        ({}, None, "set data.image_size"),
    ],
)
def test_sizes_must_agree(make_request, changes: dict[str, int], request_size: int | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        synthetic_images.prepare(SyntheticImagesConfig(**changes), make_request("images", image_size=request_size))


def test_images_for_a_text_model(make_request) -> None:
    with pytest.raises(DataError, match="the model's task is causal_lm; choose an image model"):
        synthetic_images.prepare(SyntheticImagesConfig(), make_request("causal_lm"))
