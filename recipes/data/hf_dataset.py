"""``hf_dataset``: a dataset of the `datasets` library on this machine, prepared first or tokenised while training.

Rows are read in the dataset's own order and shuffled by our permutation of samples, never through the library's
shuffle buffer: its content is not part of a saved position, ours has none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from recipes.data.cache import prepared_folder
from recipes.data.corpus import Document, RandomAccessCorpus, limited_lengths
from recipes.data.errors import DataError, listed
from recipes.data.files import Key, check_text_column, existing_path, files_identity, find_files
from recipes.data.records import PrepareRequest, Splits
from recipes.data.text import prepare_text
from recipes.schema.data import HFDatasetConfig

_FORMAT = 1  # of converted folders
_CONVERTED = "dataset"
_ROWS = 1024  # read at once
_DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow", ".txt")


def prepare(config: HFDatasetConfig, request: PrepareRequest) -> Splits:
    folder = existing_path(config.path, "data.path", "a folder written by save_to_disk, or one of data files")
    if not folder.is_dir():
        raise DataError(
            f"data.path={config.path} is a file; data=hf_dataset expects a folder (data=text_files reads single files)"
        )
    saved = folder if _is_saved(folder) else _converted(folder, request)
    dataset = _split_of(saved, config.split, folder)
    check_text_column(dataset.features.arrow_schema, config.text_field, f"data.path={folder}")
    corpus = DatasetCorpus(folder, config.split, dataset, config.text_field)
    return prepare_text(config, request, corpus, streaming=config.streaming)


def _is_saved(folder: Path) -> bool:
    """Whether save_to_disk wrote it."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _converted(folder: Path, request: PrepareRequest) -> Path:
    """A folder of data files as a saved dataset in our cache, which every process can map into memory."""
    find_files(folder, _DATA_SUFFIXES, "data.path")

    def build(prepared: Path) -> None:
        request.report(f"converting {folder}")
        with tempfile.TemporaryDirectory(dir=prepared) as own_cache:
            try:
                found = datasets.load_dataset(str(folder), cache_dir=own_cache)
            except Exception as error:  # the library raises a family of its own, pyarrow's and OSError
                raise _unloadable(folder, error) from error
            found.save_to_disk(prepared / _CONVERTED)

    key = {"format": _FORMAT, "files": _files_below(folder)}
    return prepared_folder(request, "datasets", key, build) / _CONVERTED


def _split_of(saved: Path, split: str, folder: Path) -> datasets.Dataset:
    try:
        found: Any = datasets.load_from_disk(str(saved))
    except Exception as error:  # see above
        raise _unloadable(folder, error) from error
    splits = found if isinstance(found, dict) else {str(found.split or split): found}
    if split not in splits:
        raise DataError(f"data.split={split}: {folder} has no such split, it has: {listed(sorted(splits))}")
    return splits[split]


def _unloadable(folder: Path, error: Exception) -> DataError:
    return DataError(
        f"data.path={folder}: the `datasets` library cannot load it ({type(error).__name__}: {error}). Expected a "
        f"folder written by save_to_disk, or one of {', '.join(_DATA_SUFFIXES)} files"
    )


def _files_below(folder: Path) -> Key:
    return files_identity(sorted(path for path in folder.rglob("*") if path.is_file()), folder)


class DatasetCorpus(RandomAccessCorpus):
    """Row i is document i; a null is an empty document."""

    def __init__(self, folder: Path, split: str, dataset: datasets.Dataset, text_field: str) -> None:
        self._folder, self._split, self._field = folder, split, text_field
        # Arrow tables without conversion; select_columns keeps a saved dataset's row order (its indices) in force.
        self._rows = dataset.select_columns([text_field]).with_format("arrow")
        self.name = f"{folder} [{split}]"

    def identity(self) -> Key:
        return {"kind": "hf_dataset", "split": self._split, "field": self._field, "files": _files_below(self._folder)}

    def documents(self) -> Iterator[Document]:
        row = 0
        for column in self._columns():
            for text in column.to_pylist():
                yield Document(text or "", f"{self.name}, row {row}")
                row += 1

    def lengths(self, max_bytes: int | None) -> NDArray[np.int64]:
        """Reads offsets only, not the text."""
        found = [pyarrow.compute.fill_null(pyarrow.compute.binary_length(column), 0) for column in self._columns()]
        lengths = np.concatenate([np.zeros(0, dtype=np.int64), *(np.asarray(part, dtype=np.int64) for part in found)])
        return limited_lengths(lengths, max_bytes)

    def document_bytes(self, number: int, first: int, last: int) -> bytes:
        column = self._rows[number : number + 1].column(0)
        buffer = column[0].as_buffer()  # a view of the mapped file: only the asked-for bytes are read
        return bytes(memoryview(buffer)[first:last])

    def _columns(self) -> Iterator[pyarrow.ChunkedArray]:
        for first in range(0, len(self._rows), _ROWS):
            yield self._rows[first : first + _ROWS].column(0)
