"""When a checkpoint is due: every so many steps, or minutes by rank 0's clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from recipes.checkpoint.every import Every
from recipes.ranks import Ranks


class SaveTimes:
    """Ask after each step. null: never."""

    def __init__(self, every: Every | None, ranks: Ranks, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._ranks, self._clock = every or Every(), ranks, clock
        self._last = clock()

    def wants(self, done: int) -> bool:
        """This rank's wish after ``done`` steps, without communication: a checkpoint is due if any rank wishes it.
        By steps all ranks wish alike; by minutes only rank 0 does."""
        if self._every.steps is not None:
            return done % self._every.steps == 0
        if self._every.seconds is not None:
            return self._ranks.is_main and self._clock() - self._last >= self._every.seconds
        return False

    def saved(self) -> None:
        """A save begins now: the minutes count from here."""
        self._last = self._clock()
