"""The adaptive rate limit: raises or lowers ``max_inflight`` from the allocator's statistics. Pure.

The paper's advice, made automatic: gathers running far ahead make the caching allocator over-allocate, which shows
as ``num_alloc_retries``. A retry lowers the limit at once; a long quiet stretch with memory to spare raises it by
one. After a retry the limit that caused it is not tried again for twice as long as before (so it settles).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemorySample:
    """What one rank's allocator said at the end of a step. Bytes; ``limit_bytes`` is what the device has."""

    num_alloc_retries: int
    allocated_bytes: int
    reserved_bytes: int
    limit_bytes: int


@dataclass(frozen=True)
class Pressure:
    """A sample as the numbers that ranks agree on (the maximum over ranks of each)."""

    new_retries: int
    reserved_permille: int  # of the device's memory
    idle_permille: int  # reserved but not allocated, of the device's memory


@dataclass(frozen=True)
class Decision:
    """A change of the limit and its reason, for the log."""

    step: int
    before: int
    after: int
    reason: str


def pressure_between(previous: MemorySample | None, sample: MemorySample) -> Pressure:
    """What happened since the previous sample. A counter that went back (statistics were reset) counts as new."""
    before = previous.num_alloc_retries if previous is not None else 0
    new = sample.num_alloc_retries - before if sample.num_alloc_retries >= before else sample.num_alloc_retries
    limit = max(sample.limit_bytes, 1)
    return Pressure(
        new_retries=new,
        reserved_permille=1000 * sample.reserved_bytes // limit,
        idle_permille=1000 * max(sample.reserved_bytes - sample.allocated_bytes, 0) // limit,
    )


class AdaptiveLimit:
    """Feed it one agreed ``Pressure`` per step; ``limit`` is always within [1, ceiling]."""

    QUIET_STEPS = 20
    SPARE_PERMILLE = 900  # raise only while less than this is reserved

    def __init__(self, start: int, ceiling: int) -> None:
        self.ceiling = max(ceiling, 1)
        self.limit = min(max(start, 1), self.ceiling)
        self.decisions: list[Decision] = []
        self._step = 0
        self._quiet = 0
        self._needed_quiet = self.QUIET_STEPS

    def observe(self, pressure: Pressure) -> int:
        """The limit for the next step."""
        self._step += 1
        if pressure.new_retries > 0:
            self._quiet = 0
            self._needed_quiet = min(self._needed_quiet * 2, 64 * self.QUIET_STEPS)
            self._change(-1, f"{pressure.new_retries} allocation retries")
            return self.limit
        self._quiet += 1
        has_room = pressure.reserved_permille < self.SPARE_PERMILLE
        if self._quiet >= self._needed_quiet and has_room:
            self._quiet = 0
            self._change(
                +1, f"{self._needed_quiet} steps without retries, {pressure.reserved_permille / 10:.0f}% reserved"
            )
        return self.limit

    def state_dict(self) -> dict[str, int]:
        return {"limit": self.limit, "step": self._step, "quiet": self._quiet, "needed_quiet": self._needed_quiet}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The saved limit, or this one's ceiling if that is lower."""
        self.limit = min(max(state["limit"], 1), self.ceiling)
        self._step, self._quiet, self._needed_quiet = state["step"], state["quiet"], state["needed_quiet"]

    def _change(self, by: int, reason: str) -> None:
        after = min(max(self.limit + by, 1), self.ceiling)
        if after != self.limit:
            self.decisions.append(Decision(self._step, self.limit, after, reason))
            self.limit = after
