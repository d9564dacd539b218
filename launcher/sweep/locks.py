"""Locks that the kernel lets go of when their holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

_LOOK_AGAIN_S = 0.02
_LOOKED_AT_S = 1.0  # somebody who only asks whether a lock is held holds it for microseconds


class Held(Exception):
    """Somebody else holds the lock."""


class Lock:
    """Held from ``with`` to its end, by this process alone (processes it starts do not inherit it)."""

    def __init__(self, path: Path, wait_s: float = _LOOKED_AT_S) -> None:
        self._path, self._wait_s = path, wait_s
        self._fd = -1

    def __enter__(self) -> Lock:
        """Raises Held, or OSError if the file cannot be made."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + self._wait_s
        while not _take(self._fd):
            if time.monotonic() >= deadline:
                os.close(self._fd)
                raise Held(str(self._path))
            time.sleep(_LOOK_AGAIN_S)
        return self

    def write(self, text: str) -> None:
        """A word about the holder, for whoever finds the lock held."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._fd)


def is_held(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _take(fd)
    finally:
        os.close(fd)


def _take(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: nothing can be promised there
    return True
