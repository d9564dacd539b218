"""Files that a killed program must not leave torn: lines that are only added, and texts that are replaced whole."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append_line(path: Path, facts: Mapping[str, Any]) -> None:
    """One more line of JSON, by one ``write``, on the disk when this returns. Raises OSError."""
    line = json.dumps(facts).encode() + b"\n"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line  # a line before this one was cut short
        if os.write(fd, line) < len(line):  # the disk was full in the middle of it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(fd)
    finally:
        os.close(fd)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, none if there is no file; a line that is being written, or was cut short,
    is passed over. Raises OSError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    found = []
    for line in content.split(b"\n"):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def write_whole(path: Path, text: str) -> None:
    """The text in place of what was there: a reader, and a kill, meet the one or the other. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
