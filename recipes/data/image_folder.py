"""``image_folder``: one sub-folder of images per class.

An image is scaled to cover the square and cut to its middle; training images are mirrored in half of the epochs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.data.errors import DataError, listed
from recipes.data.files import existing_path, find_files
from recipes.data.images import resolved_image_size
from recipes.data.randomness import key_of, random_bits
from recipes.data.records import Batch, DataInfo, Dataset, PrepareRequest, Splits
from recipes.schema.data import ImageFolderConfig

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)  # of ImageNet's red, green and blue, from 0 to 1
_STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)


def prepare(config: ImageFolderConfig, request: PrepareRequest) -> Splits:
    image_size = resolved_image_size(config.kind, config.image_size, request)
    _pillow()  # its absence is better told before the folder's contents
    folder = existing_path(config.path, "data.path", "a folder with one sub-folder of images per class")
    classes, paths, labels = _listed_images(folder)
    is_held_out = _held_out(paths, folder, config.eval_fraction)
    train, held_out = (
        ImageFiles(
            [path for path, is_chosen in zip(paths, chosen, strict=True) if is_chosen],
            labels[chosen],
            image_size,
            mirror_seed,
        )
        for chosen, mirror_seed in ((~is_held_out, request.seed), (is_held_out, None))
    )
    if len(train) == 0:
        raise DataError(f"data.path={folder}: {len(paths)} images are too few; none is left to train on")
    names = "\n".join(f"{path.relative_to(folder)} {path.stat().st_size}" for path in paths)
    info = DataInfo(
        task="images",
        num_classes=len(classes),
        image_size=image_size,
        num_train=len(train),
        num_eval=len(held_out),
        description=f"images from {folder}, {len(classes)} classes: {listed(classes)}",
        extras={"fingerprint": f"{len(train)}-{zlib.crc32(names.encode()):08x}", "classes": tuple(classes)},
    )
    return Splits(train, held_out, info)


class ImageFiles(Dataset):
    """Files with labels [N]. ``mirror_seed``: of the mirroring; None mirrors nothing."""

    def __init__(self, paths: list[Path], labels: NDArray[np.int64], image_size: int, mirror_seed: int | None) -> None:
        self._paths, self._labels = paths, labels
        self._image_size, self._mirror_seed = image_size, mirror_seed

    def __len__(self) -> int:
        return len(self._paths)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        images = np.stack([_read_image(self._paths[index], self._image_size) for index in indices])
        if self._mirror_seed is not None:
            numbers = np.asarray(indices, dtype=np.uint64)
            is_mirrored = random_bits(key_of("mirror", self._mirror_seed, epoch), numbers) % np.uint64(2) == 1
            images[is_mirrored] = images[is_mirrored, :, ::-1]
        pixels = (images.astype(np.float32) / 255 - _MEAN) / _STD  # [B, H, H, 3]
        return {
            "pixels": torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))),
            "labels": torch.from_numpy(self._labels[np.asarray(indices, dtype=np.int64)]),
        }


def _listed_images(folder: Path) -> tuple[list[str], list[Path], NDArray[np.int64]]:
    """Class names, files in the order of classes and names, and the class number of each file."""
    if not folder.is_dir():
        raise DataError(f"data.path={folder} is a file; expected a folder with one sub-folder of images per class")
    subfolders = sorted(place for place in folder.iterdir() if place.is_dir() and not place.name.startswith("."))
    if len(subfolders) < 2:
        raise DataError(
            f"data.path={folder}: expected one sub-folder of images per class, at least two; "
            f"its sub-folders are: {listed([place.name for place in subfolders])}"
        )
    per_class = [find_files(place, _SUFFIXES, "data.path") for place in subfolders]
    labels = np.repeat(np.arange(len(subfolders)), [len(files) for files in per_class])
    return [place.name for place in subfolders], [path for files in per_class for path in files], labels


def _held_out(paths: list[Path], folder: Path, eval_fraction: float) -> NDArray[np.bool_]:
    """Drawn by a hash of the file's name, so that a file keeps its split when others are added."""
    draws = np.array([key_of("held out", str(path.relative_to(folder))) for path in paths], dtype=np.uint64)
    count = max(1, round(len(paths) * eval_fraction)) if eval_fraction > 0 else 0
    is_held_out = np.zeros(len(paths), dtype=bool)
    is_held_out[np.argsort(draws, kind="stable")[:count]] = True
    return is_held_out


def _read_image(path: Path, image_size: int) -> NDArray[np.uint8]:
    """[H, H, 3]"""
    pillow = _pillow()
    from PIL import ImageOps  # after the check that it is installed

    try:
        with pillow.open(path) as image:
            image.draft("RGB", (2 * image_size, 2 * image_size))  # JPEG: decode no larger than needed
            square = ImageOps.fit(image.convert("RGB"), (image_size, image_size), pillow.Resampling.BILINEAR)
            return np.array(square)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise DataError(f"{path}: not a readable image ({error}); mend it or take it out of the folder") from error


def _pillow() -> ModuleType:
    try:
        from PIL import Image  # an extra: only this source needs it
    except ImportError:
        raise DataError(
            "data=image_folder needs Pillow, which is not installed: pip install 'fsdp-launcher[images]'"
        ) from None
    return Image
