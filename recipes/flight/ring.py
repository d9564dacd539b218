"""The file of one rank's last events: a header and a ring of fixed-size records in memory-mapped pages.

Whatever happens to the process (SIGKILL, SIGSTOP, a deadlock), the pages are the kernel's and can be read by others of
the same host; over a shared file system other hosts see them as far as it is coherent.

==========  =======================================================================================================
header      magic, format, capacity, rank, world size, pid, attempt, host name; then the number of the newest record
record      number, time (seconds since the epoch), step, ordinal, text, number once more
==========  =======================================================================================================

Record n lies in slot n mod capacity. The two numbers of a record are equal unless its writer was interrupted in the
middle of it, or overwrote it while it was read: such a torn record is left out.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

CAPACITY = 2048  # records; 256 KiB a rank, some steps of a large model
TEXT_BYTES = 88
RECORD = struct.Struct(f"<Qdqq{TEXT_BYTES}sQ")
NEWEST = struct.Struct("<Q")
NEWEST_AT = 128
RECORDS_AT = 192
_MAGIC = b"fsdpfly1"
_HEADER = struct.Struct("<8sIIIIII64s")  # magic, record size, capacity, rank, world size, pid, attempt, host
_SEPARATOR = b"\0"


@dataclass(frozen=True)
class Entry:
    """One event.

    number: 1 for the rank's first event. time_s: since the epoch, by the rank's clock. step: the training step, from 1.
    ordinal: for a collective, how many of its kind this rank has begun, this one included; else 0.
    kind, phase, unit: as the engine's event log has them. activity: what the loop was at (start-up, training, ...).
    """

    number: int
    time_s: float
    step: int
    ordinal: int
    kind: str
    phase: str
    activity: str
    unit: str


@dataclass(frozen=True)
class Ring:
    """What one file held: who wrote it, and its whole records, oldest first."""

    rank: int
    world_size: int
    pid: int
    attempt: int
    host: str
    entries: tuple[Entry, ...]


def ring_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.bin"


def packed_text(kind: str, phase: str, activity: str, unit: str) -> bytes:
    """The strings of a record. Of a long unit name the end is kept, where block numbers are."""
    head = _SEPARATOR.join(part.encode() for part in (kind, phase, activity)) + _SEPARATOR
    room = TEXT_BYTES - len(head)
    name = unit.encode()
    return head + (name if len(name) <= room else b"..." + name[len(name) - room + 3 :])


def create(folder: Path, *, rank: int, world_size: int, attempt: int, host: str) -> mmap.mmap:
    """A new file, mapped for writing.

    Its space is reserved first: a write into mapped pages that the disk has no room for would kill the process.

    Raises:
        OSError: the file cannot be made, filled or mapped here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    num_bytes = RECORDS_AT + CAPACITY * RECORD.size
    fd = os.open(ring_path(folder, rank), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        if hasattr(os, "posix_fallocate"):  # macOS has none
            os.posix_fallocate(fd, 0, num_bytes)
        else:
            os.write(fd, bytes(num_bytes))
        memory = mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)
    _HEADER.pack_into(
        memory, 0, _MAGIC, RECORD.size, CAPACITY, rank, world_size, os.getpid(), attempt, host.encode()[:64]
    )
    return memory


class RingReader:
    """Reads another process's file; made again for each look, or kept for many."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or ValueError if there is no such file or it is (still) something else."""
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._memory) < RECORDS_AT + RECORD.size:
            raise ValueError(f"{path}: too short for a flight recorder's file")
        magic, size, self._capacity, self._rank, self._world, self._pid, self.attempt, host = _HEADER.unpack_from(
            self._memory
        )
        if magic != _MAGIC or size != RECORD.size or len(self._memory) != RECORDS_AT + self._capacity * size:
            raise ValueError(f"{path}: no flight recorder's file, or of another version")
        self._host = host.rstrip(b"\0").decode(errors="replace")

    def newest(self) -> int:
        """The number of the newest complete record; 0 before the first."""
        return int(NEWEST.unpack_from(self._memory, NEWEST_AT)[0])

    def entry(self, number: int) -> Entry | None:
        """None if that record is torn or was overwritten by a younger one."""
        offset = RECORDS_AT + number % self._capacity * RECORD.size
        head, time_s, step, ordinal, text, tail = RECORD.unpack_from(self._memory, offset)
        if not head == tail == number:
            return None
        kind, phase, activity, unit = (text.rstrip(b"\0") + b"\0\0\0").split(_SEPARATOR)[:4]
        words = (part.decode(errors="replace") for part in (kind, phase, activity, unit))
        return Entry(number, time_s, step, ordinal, *words)

    def ring(self) -> Ring:
        newest = self.newest()
        numbers = range(max(1, newest - self._capacity + 1), newest + 1)
        entries = tuple(entry for number in numbers if (entry := self.entry(number)) is not None)
        return Ring(self._rank, self._world, self._pid, self.attempt, self._host, entries)

    def close(self) -> None:
        self._memory.close()


def read_ring(path: Path) -> Ring | None:
    """None if there is no such file, or it is none of ours."""
    try:
        reader = RingReader(path)
    except (OSError, ValueError):
        return None
    try:
        return reader.ring()
    finally:
        reader.close()
