"""Progress of long preparations, as lines for people."""

from __future__ import annotations

import time
from collections.abc import Callable

_EVERY_S = 2.0


def readable(count: float, unit: str = "") -> str:
    """``12.3 MB``, ``1,893``: powers of 1000; small counts exactly."""
    if count < 10_000:
        return f"{count:,.0f}{' ' + unit if unit else ''}"
    for prefix in ("k", "M", "G", "T"):
        count /= 1000
        if count < 999.5 or prefix == "T":
            break
    return f"{count:.3g} {prefix}{unit}"


class Progress:
    """Reports a share of ``total`` every two seconds; short work stays silent."""

    def __init__(self, report: Callable[[str], None], what: str, total: float, unit: str = "B") -> None:
        self._report, self._what, self._total, self._unit = report, what, total, unit
        self._done = 0.0
        self._last_s = time.monotonic()

    def add(self, amount: float) -> None:
        self._done += amount
        now_s = time.monotonic()
        if now_s - self._last_s >= _EVERY_S:
            self._last_s = now_s
            done, total = readable(self._done, self._unit), readable(self._total, self._unit)
            self._report(f"{self._what}: {done} of {total} ({100 * self._done / max(self._total, 1):.0f} %)")
