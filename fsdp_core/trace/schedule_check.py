"""Was the order of events right? Pure: reads a log, returns what is wrong with it in words.

Checked: no use of a unit before its gather was waited for; none after it was freed; no free inside an open forward;
no gather of what is there already; no write to parameters between the issue of a gather and its wait; the limit of
gathers in flight; reductions only after gradients; at most ``max_sources`` reductions pending.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_core.trace.events import Event


@dataclass
class _UnitState:
    is_gathering: bool = False
    is_full: bool = False
    is_counted: bool = False  # in flight
    num_open: int = 0


@dataclass
class _Checker:
    max_inflight: int | None
    units: dict[str, _UnitState] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    peak_inflight: int = 0

    def fail(self, index: int, event: Event, what: str) -> None:
        unit = event.unit or "-"
        self.problems.append(f"event {index} ({event.kind} {unit}): {what}")

    def state(self, event: Event) -> _UnitState:
        return self.units.setdefault(event.unit, _UnitState())

    def gather(self, index: int, event: Event) -> None:
        state = self.state(event)
        if state.is_gathering or state.is_full:
            self.fail(index, event, "gathered although it is there already")
        state.is_gathering = True
        if event.unit == "<root>":
            return
        state.is_counted = True
        inflight = sum(one.is_counted for one in self.units.values())
        self.peak_inflight = max(self.peak_inflight, inflight)
        if self.max_inflight is not None and inflight > self.max_inflight and event.phase != "nested":
            self.fail(index, event, f"{inflight} gathers in flight, allowed are {self.max_inflight}")

    def wait(self, index: int, event: Event) -> None:
        state = self.state(event)
        if not state.is_gathering:
            self.fail(index, event, "waited for without a gather")
        state.is_gathering, state.is_full = False, True

    def use(self, index: int, event: Event) -> None:
        if not self.state(event).is_full:
            self.fail(index, event, "used before its gather was complete, or after it was freed")

    def free(self, index: int, event: Event) -> None:
        state = self.state(event)
        if not (state.is_full or state.is_gathering):
            self.fail(index, event, "freed although it was not gathered")
        if state.num_open:
            self.fail(index, event, "freed while its forward is running")
        state.is_full = state.is_gathering = state.is_counted = False


def check_schedule(events: Sequence[Event], *, max_inflight: int | None = None) -> list[str]:
    """Everything that is wrong, in order; empty if nothing is."""
    checker = _Checker(max_inflight)
    complete: set[str] = set()
    for index, event in enumerate(events):
        if event.kind == "gather":
            checker.gather(index, event)
        elif event.kind == "wait":
            checker.wait(index, event)
        elif event.kind == "free":
            checker.free(index, event)
        elif event.kind == "keep":
            checker.state(event).is_counted = False
        elif event.kind == "write":
            checker.fail(index, event, "its parameters were written between the issue of a gather and its wait")
        elif event.kind == "drop":
            checker.units.clear()
            complete.clear()
        elif event.kind == "gradients":
            complete.add(event.unit)
        elif event.kind == "reduce" and event.unit not in complete and event.phase != "flush":
            checker.fail(index, event, "reduced before its gradients were complete")
        if event.kind == "forward":
            if event.phase != "empty":  # a unit without parameters of its own has nothing to gather
                checker.use(index, event)
            checker.state(event).num_open += 1
        elif event.kind == "forward_end":
            checker.state(event).num_open -= 1
    return checker.problems


def first_difference(logs: Sequence[Iterable[Event]], kinds: tuple[str, ...] = ("gather", "reduce")) -> str:
    """Where the ranks' orders part; empty if they agree."""
    rows = [[event.row for event in log if event.kind in kinds] for log in logs]
    for index in range(max((len(row) for row in rows), default=0)):
        found = [row[index] if index < len(row) else ("nothing", "") for row in rows]
        if len(set(found)) > 1:
            return f"step {index}: " + ", ".join(f"rank {rank}: {' '.join(one)}" for rank, one in enumerate(found))
    return ""
