"""The writing end: one object per rank, told by the loop and the engine what happens next.

An event is written *before* what it names begins, so the newest one says where a rank is. It costs half a microsecond
and no system call, which is why it is always on.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from recipes.flight.ring import CAPACITY, NEWEST, NEWEST_AT, RECORD, RECORDS_AT, create, packed_text

START_UP, TRAINING, EVALUATION, SAVING, CLOSING = "start-up", "training", "evaluation", "saving", "closing"
COLLECTIVES = ("gather", "reduce", "settle", "norm", "sum", "max", "collect")  # all ranks begin them in one order

_RECORD_BYTES = RECORD.size
_now = time.time

_LOG = logging.getLogger(__name__)


class FlightRecorder(Protocol):
    """What the loop and the engine know of a recorder. step: the training step that is running, from 1."""

    step: int

    def event(self, kind: str, unit: str = "", phase: str = "") -> None:
        """This is about to happen."""

    def enter(self, activity: str) -> None:
        """The loop turns to something else; what follows belongs to it."""

    def during(self, activity: str) -> AbstractContextManager[None]:
        """A block that belongs to ``activity``; then what was before it goes on."""


class NoFlight:
    """Writes nothing: for tests, notebooks, and where no file can be mapped."""

    def __init__(self) -> None:
        self.step = 0

    def event(self, kind: str, unit: str = "", phase: str = "") -> None:
        pass

    def enter(self, activity: str) -> None:
        pass

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        yield


NO_FLIGHT: FlightRecorder = NoFlight()


class RingRecorder:
    """Writes into a mapped ring. One thread at a time calls: autograd's threads take turns with the loop's."""

    __slots__ = ("_activity", "_announce", "_counts", "_known", "_memory", "_write", "num_events", "step")

    def __init__(self, memory: mmap.mmap) -> None:
        self.step = 0
        self.num_events = 0
        self._memory = memory
        self._write, self._announce = RECORD.pack_into, NEWEST.pack_into
        self._activity = START_UP
        self._counts = {kind: [0] for kind in COLLECTIVES}  # how many this rank has begun
        self._known: dict[tuple[str, str, str], tuple[bytes, list[int] | None]] = {}  # of this activity

    def event(self, kind: str, unit: str = "", phase: str = "") -> None:
        try:
            text, count = self._known[kind, unit, phase]
        except KeyError:
            text, count = self._known[kind, unit, phase] = (
                packed_text(kind, phase, self._activity, unit),
                self._counts.get(kind),
            )
        ordinal = 0
        if count is not None:
            ordinal = count[0] = count[0] + 1
        number = self.num_events = self.num_events + 1
        memory, offset = self._memory, RECORDS_AT + number % CAPACITY * _RECORD_BYTES
        self._write(memory, offset, number, _now(), self.step, ordinal, text, number)
        self._announce(memory, NEWEST_AT, number)

    def enter(self, activity: str) -> None:
        self._activity = activity
        self._known.clear()
        self.event("enter")

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        before = self._activity
        self.enter(activity)
        yield  # after an error the record stays as it is: it says where the error was
        self.enter(before)


def open_recorder(folder: Path, *, rank: int, world_size: int, attempt: int, host: str) -> FlightRecorder:
    """A recorder into ``folder``; one that writes nothing, with a warning, where that is impossible."""
    try:
        memory = create(folder, rank=rank, world_size=world_size, attempt=attempt, host=host)
    except (OSError, ValueError) as error:
        _LOG.warning("no flight recorder: %s; a hang could not be explained", error)
        return NO_FLIGHT
    recorder = RingRecorder(memory)
    recorder.enter(START_UP)
    return recorder
