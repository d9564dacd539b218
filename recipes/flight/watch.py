"""Has the run stopped making progress? Looks at the rings from outside, by the watcher's own clock.

A hang is: for longer than the limit, *no* rank wrote an event. One rank that works on its own for long (rank 0
prepares the data, writes a picture) is therefore no hang as long as it writes events now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from recipes.flight.recorder import CLOSING, SAVING, START_UP
from recipes.flight.ring import Ring, RingReader, read_ring, ring_path

# What may be silent for long with nothing wrong. A rank that saves or closes may hold up others that have done so;
# start-up (imports, building a model, compiling in the first step) is over when one rank has done its first step.
_SLOW_FOR_ANY = (SAVING, CLOSING)


class Watch:
    """timeout_s: the longest silence; slow_timeout_s: in activities that may be silent for long."""

    def __init__(
        self,
        folder: Path,
        *,
        world_size: int,
        attempt: int,
        timeout_s: float,
        slow_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._world_size, self._attempt = folder, world_size, attempt
        self._timeout_s, self._slow_timeout_s = timeout_s, max(timeout_s, slow_timeout_s)
        self._clock = clock
        self._readers: dict[int, RingReader] = {}
        self._seen: dict[int, int] = {}
        self._moved_at = clock()

    @property
    def poll_s(self) -> float:
        """How often it is worth looking."""
        return min(5.0, max(0.2, self._timeout_s / 20))

    @property
    def silent_s(self) -> float:
        return self._clock() - self._moved_at

    def limit_s(self) -> float:
        """The silence that is allowed now."""
        activities = [self._activity(rank) for rank in range(self._world_size)]
        is_start_up = all(activity in (None, START_UP) for activity in activities)
        is_slow = is_start_up or any(activity in _SLOW_FOR_ANY for activity in activities)
        return self._slow_timeout_s if is_slow else self._timeout_s

    def is_hung(self) -> bool:
        """To be asked every ``poll_s``."""
        for rank in range(self._world_size):
            reader = self._reader(rank)
            newest = 0 if reader is None else reader.newest()
            if newest != self._seen.get(rank, 0):
                self._seen[rank] = newest
                self._moved_at = self._clock()
        return self.silent_s > self._timeout_s and self.silent_s > self.limit_s()

    def rings(self) -> list[Ring | None]:
        """Of every rank, as they are now."""
        found = [read_ring(ring_path(self._folder, rank)) for rank in range(self._world_size)]
        return [ring if ring is not None and ring.attempt == self._attempt else None for ring in found]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _reader(self, rank: int) -> RingReader | None:
        if rank not in self._readers:
            try:
                reader = RingReader(ring_path(self._folder, rank))
            except (OSError, ValueError):
                return None  # not there yet
            if reader.attempt != self._attempt:
                reader.close()
                return None
            self._readers[rank] = reader
        return self._readers[rank]

    def _activity(self, rank: int) -> str | None:
        reader = self._reader(rank)
        entry = reader.entry(reader.newest()) if reader is not None else None
        return None if entry is None else entry.activity
