"""Datasets saved on disk, prepared first or streamed."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pytest

from recipes.data import hf_dataset
from recipes.data.corpus import Pieces
from recipes.data.errors import DataError
from recipes.data.loading import TrainBatches
from recipes.data.records import Dataset
from recipes.data.stream import SampleStream
from recipes.data.streamed import VirtualText
from recipes.schema.data import HFDatasetConfig, TokenizerConfig

ROWS = [None if row == 7 else "".join(f"w{row:03}x{word:03} " for word in range(row % 50)) for row in range(400)]
WORDS = {word for row in ROWS if row for word in row.split()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "dataset"
    datasets.Dataset.from_dict({"id": list(range(400)), "text": ROWS}).save_to_disk(folder)
    return folder


def config(folder: Path, **changes: object) -> HFDatasetConfig:
    fields: dict[str, object] = {"path": str(folder), "seq_len": 64, "eval_fraction": 0.1}
    return HFDatasetConfig(**{**fields, **changes})  # type: ignore[arg-type]


def ids_of(dataset: Dataset) -> list[list[int]]:
    return dataset.batch(range(len(dataset)), 0)["input_ids"].tolist()


@pytest.mark.parametrize("task", ["causal_lm", "seq2seq_lm"])
def test_streamed_bytes_are_the_prepared_ones(make_request, saved: Path, task: str) -> None:
    prepared = hf_dataset.prepare(config(saved), make_request(task))
    streamed = hf_dataset.prepare(config(saved, streaming=True), make_request(task))
    for name in ("train", "eval"):
        assert ids_of(getattr(streamed, name)) == ids_of(getattr(prepared, name))
    assert streamed.info.vocab_size == prepared.info.vocab_size


def test_streaming_prepares_no_tokens(make_request, saved: Path) -> None:
    request = make_request("causal_lm")
    hf_dataset.prepare(config(saved, streaming=True), request)
    assert [path.name for path in request.cache_dir.iterdir()] == ["lengths"]


def learned(folder: Path, **changes: object) -> HFDatasetConfig:
    return config(folder, tokenizer=TokenizerConfig(kind="train", vocab_size=600), streaming=True, **changes)


def test_streaming_with_a_learned_tokenizer_leaves_nothing_out(make_request, saved: Path) -> None:
    splits = hf_dataset.prepare(learned(saved), make_request("causal_lm"))
    tokenizer = splits.info.extras["tokenizer"]
    found: dict[str, set[str]] = {}
    for name, split in (("train", splits.train), ("eval", splits.eval)):
        rows = np.array(ids_of(split))
        assert rows.shape == (len(split), 64)
        found[name] = {word for row in rows for word in tokenizer.decode(row).split()} & WORDS  # type: ignore[attr-defined]
    assert len(found["train"] | found["eval"]) > 0.98 * len(WORDS)
    assert len(found["train"] & found["eval"]) <= 1  # a word at the place where a document was cut


def test_a_streamed_sample_is_the_same_alone_and_among_others(make_request, saved: Path) -> None:
    first, second = (hf_dataset.prepare(learned(saved), make_request("causal_lm")).train for _ in range(2))
    rows = ids_of(first)
    assert [second.batch([index], 3)["input_ids"][0].tolist() for index in (11, 2)] == [rows[11], rows[2]]


def test_a_streamed_run_resumes_exactly(make_request, saved: Path) -> None:
    dataset = hf_dataset.prepare(learned(saved), make_request("seq2seq_lm")).train

    def batches() -> TrainBatches:
        return TrainBatches(dataset, SampleStream(len(dataset), 5, 4), rank=0, world_size=1, micro_batch=4)

    with batches() as stream:
        whole = [next(stream)[0]["labels"].tolist() for _ in range(6)]
        state = stream.state_dict()
    with batches() as stream:
        [next(stream) for _ in range(2)]
        state = stream.state_dict()
    with batches() as stream:
        stream.load_state_dict(state)
        assert [next(stream)[0]["labels"].tolist() for _ in range(4)] == whole[2:]


def test_a_text_shorter_than_a_sample_streams_nothing(make_request, tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a few words"]}).save_to_disk(tmp_path / "tiny")
    with pytest.raises(DataError, match="too little text to train on"):
        hf_dataset.prepare(learned(tmp_path / "tiny"), make_request("causal_lm"))


def test_row_order_of_a_saved_selection_is_kept(make_request, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a" * 40, "b" * 40, "c" * 40]})
    rows.select([2, 0]).save_to_disk(tmp_path / "selected")
    for streaming in (False, True):
        wanted = config(tmp_path / "selected", eval_fraction=0.0, streaming=streaming)
        splits = hf_dataset.prepare(wanted, make_request("causal_lm"))
        assert ids_of(splits.train) == [[ord("c") + 3] * 40 + [1] + [ord("a") + 3] * 23]


def test_a_split_is_chosen_by_name(make_request, tmp_path: Path) -> None:
    part = datasets.Dataset.from_dict({"text": ["z" * 1000]})
    datasets.DatasetDict({"train": part, "validation": part}).save_to_disk(tmp_path / "dict")
    hf_dataset.prepare(config(tmp_path / "dict", split="validation"), make_request("causal_lm"))
    with pytest.raises(DataError, match=r"data.split=test: .* it has: train, validation"):
        hf_dataset.prepare(config(tmp_path / "dict", split="test"), make_request("causal_lm"))


def test_a_folder_of_data_files(make_request, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    datasets.Dataset.from_dict({"text": ["z" * 1000]}).to_parquet(folder / "part.parquet")
    for streaming in (False, True):
        splits = hf_dataset.prepare(config(folder, streaming=streaming), make_request("causal_lm"))
        assert splits.info.num_train == 14


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_field": "body"}, "no column 'body'; its columns are: id, text"),
        ({"text_field": "id"}, "column 'id' must hold strings, it holds int64"),
    ],
)
def test_a_wrong_column_lists_the_right_ones(make_request, saved: Path, changes: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        hf_dataset.prepare(config(saved, **changes), make_request("causal_lm"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no-such-user/corpus", None, "nothing is downloaded"),
        ("empty", {}, "it holds no files"),
        ("pdf", {"a.pdf": b"x"}, r"other kinds \(\.pdf\)"),
        ("broken", {"dataset_info.json": b"{}", "state.json": b"{}"}, "cannot load it"),
        ("bad", {"a.parquet": b"no parquet"}, "cannot load it"),
    ],
)
def test_folders_that_hold_no_dataset(
    make_request, tmp_path: Path, name: str, content: dict[str, bytes] | None, message: str
) -> None:
    path = tmp_path / name if content is not None else Path(name)
    for file_name, raw in (content or {}).items():
        path.mkdir(exist_ok=True)
        (path / file_name).write_bytes(raw)
    if content == {}:
        path.mkdir()
    with pytest.raises(DataError, match=message):
        hf_dataset.prepare(config(path), make_request("causal_lm"))


def test_a_file_instead_of_a_folder(make_request, corpus_folder: Path) -> None:
    with pytest.raises(DataError, match="expects a folder"):
        hf_dataset.prepare(config(corpus_folder / "file_00.txt"), make_request("causal_lm"))


def test_virtual_text_puts_pieces_and_separators_in_a_row(saved: Path) -> None:
    class Letters(hf_dataset.RandomAccessCorpus):
        def identity(self) -> dict:
            return {}

        def documents(self):  # type: ignore[no-untyped-def]
            raise AssertionError("read by position only")

        def document_bytes(self, number: int, first: int, last: int) -> bytes:
            return ["abc", "defgh"][number].encode()[first:last]

    text = VirtualText(Letters(), Pieces(np.array([0, 1]), np.array([0, 1]), np.array([3, 4])))  # abc|efg|
    assert text.num_bytes == 8
    assert text.read(0, 8) == [(b"abc", True), (b"efg", True)]
    assert text.read(1, 3) == [(b"bc", False)]
    assert text.read(2, 6) == [(b"c", True), (b"ef", False)]
    assert text.read(3, 4) == [(b"", True)]
    assert [text.word_start(place) for place in (0, 2, 4, 6)] == [0, 0, 4, 4]
