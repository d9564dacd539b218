"""Files and samples that cannot be read: named; with ``data.on_error=skip`` left out and counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from recipes.data import image_folder, text_files
from recipes.data.errors import DataError
from recipes.data.loading import EvalBatches, TrainBatches
from recipes.data.reading import MOST_IN_A_ROW, SampleReader
from recipes.data.records import IGNORED_LABEL, Batch, Dataset
from recipes.data.stream import Sample, SampleStream
from recipes.data.text_files import FilesCorpus
from recipes.schema.data import ImageFolderConfig, TextFilesConfig


class Holes(Dataset):
    """Sample i has the value and the label i; those in ``holes`` cannot be read."""

    def __init__(self, length: int, holes: Sequence[int]) -> None:
        self._length, self._holes = length, set(holes)

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        bad = [index for index in indices if index in self._holes]
        if bad:
            raise DataError(f"sample {bad[0]}: bad sector")
        values = torch.tensor(list(indices))
        return {"values": values.float(), "labels": values}


def samples(*indices: int) -> list[Sample]:
    return [Sample(0, index) for index in indices]


def test_stop_raises_the_datas_own_error() -> None:
    with pytest.raises(DataError, match="sample 3: bad sector"):
        SampleReader(Holes(8, [3])).batch(samples(1, 3, 5))


def test_skip_fills_the_place_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    reader = SampleReader(Holes(8, [3, 4]), "skip")
    batch = reader.batch(samples(1, 3, 5, 4))
    assert batch["labels"].tolist() == [1, IGNORED_LABEL, 5, IGNORED_LABEL]
    assert batch["values"].tolist()[0] == 1 and batch["values"].tolist()[2] == 5
    assert batch["values"].shape == (4,)
    assert reader.num_unreadable == 2
    assert "sample 3 of epoch 0 is left out: sample 3: bad sector" in caplog.text


def test_a_batch_of_holes_looks_like_any_other() -> None:
    reader = SampleReader(Holes(8, [0, 1, 2]), "skip")
    assert reader.batch(samples(1, 2))["labels"].tolist() == [IGNORED_LABEL] * 2


def test_a_disk_that_is_gone_ends_the_run() -> None:
    reader = SampleReader(Holes(1000, range(1, 1000)), "skip")

    def read_on() -> None:
        for number in range(1000):
            reader.batch(samples(1 + number % 900, 2))

    with pytest.raises(DataError, match=f"{MOST_IN_A_ROW} samples in a row cannot be read, the last one: sample"):
        read_on()
    with pytest.raises(DataError, match="none of the first"):
        SampleReader(Holes(5, range(5)), "skip").batch(samples(1))


def test_the_loop_counts_what_it_took() -> None:
    dataset = Holes(16, [2, 9])
    with TrainBatches(dataset, SampleStream(16, 0, 4), rank=0, world_size=1, micro_batch=2, on_error="skip") as batches:
        labels = [label for _ in range(4) for batch in next(batches) for label in batch["labels"].tolist()]
    assert sorted(labels) == sorted([*(set(range(16)) - {2, 9}), IGNORED_LABEL, IGNORED_LABEL])
    assert batches.num_unreadable == 2


def test_an_evaluation_leaves_it_out_too() -> None:
    found = EvalBatches(Holes(6, [4]), 6, rank=0, world_size=1, micro_batch=3, on_error="skip")
    labels = [label for eval_batch in found for label in eval_batch.batch["labels"].tolist()]
    assert sorted(labels) == [IGNORED_LABEL, 0, 1, 2, 3, 5]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("words of a\n" * 50)
    (folder / "b.txt").write_bytes(b"words of b\n\xff\xfe\n")
    (folder / "c.jsonl").write_text('{"text": "first of c"}\n{"text": "second of c"}\n{"text": broken\n')
    table = pyarrow.table({"text": ["words of d"] * 50})
    pyarrow.parquet.write_table(table, folder / "d.parquet")
    whole = (folder / "d.parquet").read_bytes()
    (folder / "d.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "e.txt").write_text("words of e\n" * 50)
    return folder


def test_damaged_text_files_are_left_out_from_the_place_on(corpus: Path) -> None:
    reports: list[str] = []
    found = FilesCorpus(corpus, "text", "skip", reports.append)
    texts = [document.text for document in found.documents()]
    assert texts == ["words of a\n" * 50, "first of c", "second of c", "words of e\n" * 50]
    assert [document.text for document in found.documents()] == texts  # every pass the same
    assert len(reports) == 3  # each told once
    for report, place in zip(reports, ("b.txt:2: not UTF-8", "c.jsonl:3: not JSON", "d.parquet: not a"), strict=True):
        assert report.startswith("left out from there on: ")
        assert place in report


def test_prepared_text_with_and_without_holes_is_not_mixed_up(corpus: Path, make_request) -> None:
    splits = text_files.prepare(
        TextFilesConfig(path=str(corpus), on_error="skip", seq_len=16), make_request("causal_lm")
    )
    assert len(splits.train) > 0
    with pytest.raises(DataError, match=r"b\.txt:2: not UTF-8"):
        text_files.prepare(TextFilesConfig(path=str(corpus), seq_len=16), make_request("causal_lm"))


def test_a_damaged_image_is_left_out_of_its_batch(tmp_path: Path, make_request) -> None:
    folder = tmp_path / "images"
    for name in ("green", "red"):
        (folder / name).mkdir(parents=True)
        for number in range(4):
            Image.fromarray(np.full((20, 20, 3), number, dtype=np.uint8)).save(folder / name / f"{number}.png")
    whole = (folder / "red" / "2.png").read_bytes()
    (folder / "red" / "2.png").write_bytes(whole[: len(whole) // 2])
    config = ImageFolderConfig(path=str(folder), eval_fraction=0.0)
    train = image_folder.prepare(config, make_request("images", image_size=16)).train
    everything = samples(*range(len(train)))
    with pytest.raises(DataError, match=r"red/2\.png: not a readable image"):
        SampleReader(train).batch(everything)
    reader = SampleReader(train, "skip")
    batch = reader.batch(everything)
    assert batch["labels"].tolist() == [0, 0, 0, 0, 1, 1, IGNORED_LABEL, 1]
    assert batch["pixels"].shape == (8, 3, 16, 16)
    assert reader.num_unreadable == 1
