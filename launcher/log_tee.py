"""A log of its own for a rank whose output belongs to somebody else (torchrun): what Python writes goes to both."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from launcher.rank_output import LogLines


class _Tee:
    """A text stream that also feeds a log; everything but writing is the stream's own."""

    def __init__(self, stream: TextIO, lines: LogLines, lock: threading.Lock) -> None:
        self._stream, self._lines, self._lock = stream, lines, lock

    def write(self, text: str) -> int:
        with self._lock:
            self._lines.feed(text.encode(errors="replace"))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def tee_output(log_path: Path) -> Iterator[None]:
    """Standard output and error also go into ``log_path``, in their order, until the end of the block."""
    before = sys.stdout, sys.stderr
    with log_path.open("ab", buffering=0) as file:
        lines, lock = LogLines(file), threading.Lock()
        sys.stdout, sys.stderr = _Tee(sys.stdout, lines, lock), _Tee(sys.stderr, lines, lock)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            lines.close()
