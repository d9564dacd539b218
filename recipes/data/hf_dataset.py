"""``hf_dataset``: a dataset of the `datasets` library on this machine, prepared first or tokenised while training.

Rows are read in the dataset's own order and shuffled by our permutation of samples, never through the library's
shuffle buffer: its content is not part of a saved position, ours has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from recipes.data.corpus import Document, RandomAccessCorpus, limited_lengths
from recipes.data.errors import DataError, listed
from recipes.data.files import Key, check_text_column, existing_path, file_stats, find_files
from recipes.data.records import PrepareRequest, Splits
from recipes.data.text import prepare_text
from recipes.schema.data import HFDatasetConfig

_ROWS = 1024  # read at once
_DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow", ".txt")


def prepare(config: HFDatasetConfig, request: PrepareRequest) -> Splits:
    folder = existing_path(config.path, "data.path", "a folder written by save_to_disk, or one of data files")
    if not folder.is_dir():
        raise DataError(
            f"data.path={config.path} is a file; data=hf_dataset expects a folder (data=text_files reads single files)"
        )
    if request.is_main:  # it may convert data files into its own cache: once, while the others wait
        dataset = _load(folder, config.split, request.cache_dir)
    request.barrier()
    if not request.is_main:
        dataset = _load(folder, config.split, request.cache_dir)
    check_text_column(dataset.features.arrow_schema, config.text_field, f"data.path={folder}")
    corpus = DatasetCorpus(folder, config.split, dataset, config.text_field)
    return prepare_text(config, request, corpus, streaming=config.streaming)


def _load(folder: Path, split: str, cache_dir: Path) -> datasets.Dataset:
    is_saved = (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()
    try:
        if is_saved:
            found: Any = datasets.load_from_disk(str(folder))
        else:
            find_files(folder, _DATA_SUFFIXES, "data.path")
            found = datasets.load_dataset(str(folder), cache_dir=str(cache_dir / "datasets"))
    except DataError:
        raise
    except Exception as error:  # the library raises a family of its own, pyarrow's and OSError
        raise DataError(
            f"data.path={folder}: the `datasets` library cannot load it ({type(error).__name__}: {error}). Expected a "
            f"folder written by save_to_disk, or one of {', '.join(_DATA_SUFFIXES)} files"
        ) from error
    splits = found if isinstance(found, dict) else {str(found.split or split): found}
    if split not in splits:
        raise DataError(f"data.split={split}: {folder} has no such split, it has: {listed(sorted(splits))}")
    return splits[split]


class DatasetCorpus(RandomAccessCorpus):
    """Row i is document i; a null is an empty document."""

    def __init__(self, folder: Path, split: str, dataset: datasets.Dataset, text_field: str) -> None:
        self._folder, self._split, self._field = folder, split, text_field
        # Arrow tables without conversion; select_columns keeps a saved dataset's row order (its indices) in force.
        self._rows = dataset.select_columns([text_field]).with_format("arrow")
        self.name = f"{folder} [{split}]"

    def identity(self) -> Key:
        files = sorted(path for path in self._folder.rglob("*") if path.is_file())
        stats = [file_stats(path, self._folder) for path in files]
        return {"kind": "hf_dataset", "split": self._split, "field": self._field, "files": stats}

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
