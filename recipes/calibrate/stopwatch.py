"""How long a piece of work takes, on all ranks at the same time: they share a host's cores and memory in training too.

The median over repeats, then the mean over ranks. On CUDA the device's own clock (events on the current stream).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from recipes.ranks import Ranks

_MOST_REPEATS = 200
_FEWEST_REPEATS = 3

Work = Callable[[], object]


class Stopwatch:
    """budget_s: what one measurement may take, about. Every rank times the same work equally often."""

    def __init__(self, ranks: Ranks, budget_s: float) -> None:
        self.ranks, self.budget_s = ranks, budget_s

    def seconds(self, work: Work, *, calls: int = 1) -> float:
        """Of one call; ``calls``: as many are timed together. Collective."""
        self._timed(work, 1)  # first calls set things up
        repeats = self._repeats(self._timed(work, calls))
        self.ranks.barrier()
        found = statistics.median(self._timed(work, calls) for _ in range(repeats)) / calls
        return self.mean(found)

    def mean(self, value: float) -> float:
        """Over ranks. Collective."""
        mine = torch.tensor(value, dtype=torch.float64, device=self.ranks.device)
        return float(self.ranks.sum(mine)) / self.ranks.world_size

    def _repeats(self, once_s: float) -> int:
        """The same on every rank."""
        wanted = self.budget_s / max(self.mean(once_s), 1e-9)
        return max(_FEWEST_REPEATS, min(_MOST_REPEATS, int(wanted)))

    def _timed(self, work: Work, calls: int) -> float:
        if self.ranks.device.type != "cuda":
            started = time.perf_counter()
            for _ in range(calls):
                work()
            return time.perf_counter() - started
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def host_seconds(self, work: Work, calls: int) -> float:
        """What issuing one call costs the host; the device's work is not waited for inside. Collective."""
        found = []
        for _ in range(_FEWEST_REPEATS + 2):
            if self.ranks.device.type == "cuda":
                torch.cuda.synchronize(self.ranks.device)
            started = time.perf_counter()
            for _ in range(calls):
                work()
            found.append((time.perf_counter() - started) / calls)
        return self.mean(statistics.median(found))
