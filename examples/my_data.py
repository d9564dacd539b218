"""A data source of your own: one column of CSV files as text. Copy this file anywhere and change it.

fsdp-launch plugins='[./examples/my_data.py]' data=csv_text data.path="$HOME/tickets" data.column=body
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.data.corpus import Corpus, Document
from recipes.data.errors import DataError
from recipes.data.files import existing_path, files_identity, find_files
from recipes.registry import register_data
from recipes.schema import MISSING, described
from recipes.schema.data import TextDataConfig

if TYPE_CHECKING:
    from recipes.data.records import PrepareRequest, Splits


@dataclass
class CSVTextConfig(TextDataConfig):
    """The keys below ``data``. Those of every text source (tokenizer, seq_len, ...) come with the base class."""

    kind: str = described("csv_text", "csv_text")
    path: str = described(MISSING, "a .csv file, or a folder of such")
    column: str = described("text", "column that holds the text")


class CSVCorpus(Corpus):
    """The documents: one per row."""

    def __init__(self, path: str, column: str) -> None:
        place = existing_path(path, "data.path", "a .csv file, or a folder of such")
        self.name = str(place)
        self._base = place if place.is_dir() else place.parent
        self._files = find_files(place, (".csv",), "data.path")
        self._column = column

    def identity(self) -> dict:
        """Changes when the text may have changed: the prepared tokens are then made anew."""
        return {"kind": "csv_text", "column": self._column, "files": files_identity(self._files, self._base)}

    def documents(self) -> Iterator[Document]:
        for path in self._files:
            yield from self._rows(path)

    def _rows(self, path: Path) -> Iterator[Document]:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if self._column not in (reader.fieldnames or []):
                raise DataError(f"{path}: no column '{self._column}'; its columns are: {reader.fieldnames}")
            for row in reader:
                yield Document(row[self._column] or "", f"{path}:{reader.line_num}")


@register_data("csv_text", CSVTextConfig, task="text")
class CSVText:
    """Tokenising, the cache, the held-out part and packing are what every text source has."""

    @staticmethod
    def prepare(config: CSVTextConfig, request: PrepareRequest) -> Splits:
        # Imported when data is prepared: it loads torch, which checking a config should not wait for.
        from recipes.data.text import prepare_text

        return prepare_text(config, request, CSVCorpus(config.path, config.column))
