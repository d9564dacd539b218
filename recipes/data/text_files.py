"""``text_files``: a folder (or one file) of .txt, .md, .jsonl and .parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from recipes.data.corpus import Corpus, Document
from recipes.data.errors import DataError
from recipes.data.files import TEXT_SUFFIXES, Key, existing_path, files_identity, find_files, read_documents
from recipes.data.records import PrepareRequest, Splits
from recipes.data.text import prepare_text
from recipes.schema.data import TextFilesConfig


def prepare(config: TextFilesConfig, request: PrepareRequest) -> Splits:
    place = existing_path(config.path, "data.path", f"a folder with {', '.join(TEXT_SUFFIXES)} files, or one such file")
    return prepare_text(config, request, FilesCorpus(place, config.text_field, config.on_error, request.report))


class FilesCorpus(Corpus):
    """A document is a text file, a line of a .jsonl file, or a row of a .parquet file; files in the order of names."""

    def __init__(
        self, place: Path, text_field: str, on_error: str = "stop", report: Callable[[str], None] = print
    ) -> None:
        """on_error: ``skip`` leaves a file out from the place on where it cannot be read, and reports it."""
        self._place, self._text_field = place, text_field
        self._on_error, self._report = on_error, report
        self._reported: set[Path] = set()
        self._files = find_files(place, TEXT_SUFFIXES, "data.path")
        self.name = str(place)

    def identity(self) -> Key:
        base = self._place if self._place.is_dir() else self._place.parent
        key: Key = {"kind": "files", "field": self._text_field, "files": files_identity(self._files, base)}
        return {**key, "on_error": self._on_error} if self._on_error == "skip" else key

    def documents(self) -> Iterator[Document]:
        for path in self._files:
            try:
                for text, where in read_documents(path, self._text_field):
                    yield Document(text, where)
            except DataError as error:
                if self._on_error == "stop":
                    raise
                if path not in self._reported:
                    self._reported.add(path)
                    self._report(f"left out from there on: {error}")
