"""Which unit to gather next. Integers only: positions of units in the order of the forward.

Backward prefetch uses the order recorded in this iteration's forward, reversed. Forward prefetch assumes that the
previous iteration's order repeats (static graphs) and gives up for the rest of a pass once it does not.
"""

from __future__ import annotations


class ForwardOrder:
    """Unit ids in the order their forwards began, one entry per call."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self._last_index: dict[int, int] = {}

    def record(self, unit_id: int) -> None:
        self._last_index[unit_id] = len(self.recorded)
        self.recorded.append(unit_id)

    def before(self, unit_id: int) -> int | None:
        """The unit that ran before the last call of ``unit_id``: the next one that backward needs."""
        index = self._last_index.get(unit_id)
        while index is not None and index > 0:
            index -= 1
            candidate = self.recorded[index]
            # a unit called again later has had its backward already, unless that call is still ahead of us
            if candidate != unit_id and self._last_index[candidate] == index:
                return candidate
        return None


class ForwardPrediction:
    """Walks along the previous pass's order."""

    def __init__(self, previous: list[int]) -> None:
        self._previous = previous
        self._position = 0

    def after(self, unit_id: int) -> int | None:
        """The unit expected after ``unit_id``, or ``None`` at the end or once the order has changed."""
        if self._position >= len(self._previous) or self._previous[self._position] != unit_id:
            self._position = len(self._previous)
            return None
        self._position += 1
        return self._previous[self._position] if self._position < len(self._previous) else None
