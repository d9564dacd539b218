"""The checksum of every file of a checkpoint: CRC-32, as ``crc32:89abcdef``. No torch here.

It is there against cut files, flipped bits and mixed-up copies, not against forgers. CRC-32 of zlib runs at
1.7 GB/s on the machine it was chosen on, where SHA-256 reached 0.8 and BLAKE2b 0.35; it is computed while writing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

CHUNK_BYTES = 16 << 20


class Checksum:
    """``add`` bytes, read ``text``."""

    def __init__(self) -> None:
        self._value = 0

    def add(self, data: bytes | memoryview) -> None:
        self._value = zlib.crc32(data, self._value)

    @property
    def text(self) -> str:
        return f"crc32:{self._value:08x}"


def checksum(data: bytes) -> str:
    running = Checksum()
    running.add(data)
    return running.text


def checksum_of_file(path: Path) -> str:
    """Reads the whole file, ``CHUNK_BYTES`` at a time. Raises OSError."""
    running = Checksum()
    for chunk in _chunks(path):
        running.add(chunk)
    return running.text


def _chunks(path: Path) -> Iterable[memoryview]:
    buffer = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield memoryview(buffer)[:count]
