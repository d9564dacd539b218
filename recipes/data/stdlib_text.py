"""``stdlib_text``: the sources of the running Python's standard library, and the reference texts of ``help()``.

About 31 MB of real text where the library's own tests are installed, half of that where a distribution leaves them
out. The text differs between Python versions; numbers from it compare only within one.
"""

from __future__ import annotations

import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from recipes.data.corpus import Corpus, Document
from recipes.data.errors import DataError
from recipes.data.files import Key, files_identity
from recipes.data.records import PrepareRequest, Splits
from recipes.data.text import prepare_text
from recipes.schema.data import StdlibTextConfig

_SUFFIXES = (".py", ".txt", ".rst")
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_TOPICS = Path("pydoc_data", "topics.py")  # read as the texts it holds, not as one long literal


def prepare(config: StdlibTextConfig, request: PrepareRequest) -> Splits:
    return prepare_text(config, request, StdlibCorpus(Path(sysconfig.get_path("stdlib"))))


class StdlibCorpus(Corpus):
    """One document per file, then one per topic; files that do not decode (tests of broken encodings) are left out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = f"Python {platform.python_version()} standard library"

    def identity(self) -> Key:
        return {"kind": "stdlib", "files": files_identity(self._files, self._folder)}

    def documents(self) -> Iterator[Document]:
        for path in self._files:
            if path.relative_to(self._folder) == _TOPICS:
                continue
            text = _decoded(path)
            if text is not None:
                yield Document(text, str(path))
        yield from _topics()

    @cached_property
    def _files(self) -> list[Path]:
        found: list[Path] = []
        for folder, subfolders, names in os.walk(self._folder):
            subfolders[:] = [name for name in subfolders if name not in _NOT_THE_LIBRARY]
            found.extend(Path(folder, name) for name in names if name.endswith(_SUFFIXES))
        if not found:
            raise DataError(
                f"data=stdlib_text: this Python has no library sources in {self._folder}; "
                "use data=text_files data.path=FOLDER"
            )
        return sorted(found)


def _decoded(path: Path) -> str | None:
    """The file's text, by its coding line if it is Python; None if it cannot be decoded or read."""
    try:
        if path.suffix == ".py":
            with tokenize.open(path) as file:
                return file.read()
        return path.read_text(encoding="utf-8")
    except (SyntaxError, UnicodeDecodeError, OSError):
        return None


def _topics() -> Iterator[Document]:
    try:
        from pydoc_data.topics import topics  # some distributions leave it out
    except ImportError:
        return
    for name in sorted(topics):
        yield Document(topics[name], f"help('{name}')")
