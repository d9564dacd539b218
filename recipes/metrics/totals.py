"""What is left of all steps' lines when a run has ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from recipes.metrics.ledger import Line

_MEMORY_NAMES = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes", "peak_rss_bytes")


class RunTotals:
    """What the summary needs of all steps' lines, in one number a step."""

    def __init__(self) -> None:
        self.last: Line | None = None
        self.peak_memory: dict[str, int] = {}
        self.num_skipped = 0  # updates left out
        self.num_unreadable = 0  # samples left out
        self.num_overflowed = 0  # of a gradient in float16: left out by the scaler
        self._step_s: list[float] = []

    def add(self, line: Line) -> None:
        self.last = line
        self._step_s.append(float(line["step_s"] or 0.0))
        self.num_skipped += int(line.get("skipped") or 0)
        self.num_unreadable += int(line.get("unreadable_samples") or 0)
        self.num_overflowed += int(line.get("overflowed") or 0)
        for name in _MEMORY_NAMES:
            if line.get(name) is not None:
                self.peak_memory[name] = max(self.peak_memory.get(name, 0), int(line[name] or 0))

    @classmethod
    def of(cls, lines: Iterable[Line]) -> RunTotals:
        """Of a run's lines so far; those of evaluations have no duration and do not count."""
        totals = cls()
        for line in lines:
            if line.get("step_s") is not None:
                totals.add(line)
        return totals

    def as_json(self) -> dict[str, Any]:
        return {
            "last": self.last,
            "peak_memory": self.peak_memory,
            "num_skipped": self.num_skipped,
            "num_unreadable": self.num_unreadable,
            "num_overflowed": self.num_overflowed,
            "step_s": self._step_s,
        }

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> RunTotals:
        totals = cls()
        totals.last, totals.peak_memory = plain["last"], plain["peak_memory"]
        totals.num_skipped, totals.num_unreadable = plain["num_skipped"], plain["num_unreadable"]
        totals.num_overflowed = plain["num_overflowed"]
        totals._step_s = plain["step_s"]
        return totals

    @property
    def train_s(self) -> float:
        return sum(self._step_s)

    @property
    def median_step_s(self) -> float:
        """The first steps, which warm up, do not move a median."""
        ordered = sorted(self._step_s)
        return ordered[len(ordered) // 2] if ordered else float("nan")

    def rate_of_median_step(self, name: str) -> float | None:
        """A rate of the last line, had its step taken as long as the median one. None where it is not known."""
        if self.last is None or self.last.get(name) is None:
            return None
        return float(self.last[name] or 0.0) * float(self.last["step_s"] or 0.0) / self.median_step_s
