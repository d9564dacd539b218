"""The event log: what the engine did, in the order it did it. Off unless asked for; one list, no clock needed.

Kinds and what they mean (``unit`` is a name, ``nbytes`` what the step moves or frees):

| kind | stream | when |
|---|---|---|
| pass | compute | an outermost forward begins |
| gather | gather | an unshard is issued; ``phase`` says for what (forward, backward, prefetch) |
| wait | compute | compute is ordered behind the unit's gather |
| forward, forward_end | compute | the unit's forward begins, has returned |
| backward | compute | the first use of the unit's weights in this backward |
| gradients | compute | the unit's gradients are complete |
| keep | compute | the unit's forward has returned; it stays gathered and is no longer in flight |
| write | compute | found at ``wait``: parameters were written since the gather was issued |
| free | compute | ``full`` is given back |
| reduce | reduce | a reduction is issued |
| accumulate | reduce | unsynchronised gradients were added, nothing was sent |
| backward_end | compute | all reductions have finished, gradients are visible |
| limit | compute | the adaptive limit has changed; ``phase`` says from what to what |
| drop | compute | a failed pass was forgotten |
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Event:
    """One row of the log."""

    kind: str
    unit: str = ""
    phase: str = ""
    stream: str = "compute"
    nbytes: int = 0
    time_s: float = 0.0

    @property
    def row(self) -> tuple[str, str]:
        """What schedule tests compare: the kind and the unit."""
        return self.kind, self.unit


class FlightRecorder(Protocol):
    """Told where this rank turns to next, each time before it may not come back from there.

    Of the log's kinds: pass, gather, forward, forward_end, backward (once what it needs is on its way), reduce (once
    the unit's gradients are complete: it begins with the wait for earlier reductions) and backward_end. And: await (a
    gather of ``unit`` that was issued earlier), finish (all reductions), settle (peers that may still read this rank's
    parameters). So the newest event says where a rank is, also when it never comes back.
    """

    def event(self, kind: str, unit: str = "", phase: str = "") -> None: ...


class EventLog:
    """Grows until it is cleared; ``has_clock`` adds the host's time to every row."""

    def __init__(self, has_clock: bool = False) -> None:
        self.events: list[Event] = []
        self._has_clock = has_clock

    def record(self, kind: str, unit: str = "", phase: str = "", stream: str = "compute", nbytes: int = 0) -> None:
        time_s = time.perf_counter() if self._has_clock else 0.0
        self.events.append(Event(kind, unit, phase, stream, nbytes, time_s))

    def rows(self, *kinds: str) -> list[tuple[str, str]]:
        """(kind, unit) of all events, or of those of the given kinds."""
        return [event.row for event in self.events if not kinds or event.kind in kinds]

    def clear(self) -> None:
        self.events.clear()
