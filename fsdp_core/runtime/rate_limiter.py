"""Cap on gathers in flight (paper section 3.4): from issue until the computation that reads them has finished.

Pure bookkeeping over events: the limiter neither gathers nor frees. A unit *enters* when its gather is issued and
*leaves*, with an event of the compute stream, when it is resharded (or turns out to be kept). Only an event that
has not happened yet makes the host wait, and only as long as needed for one permit.

Whether there is room follows from the order of the calls alone, never from how far the device happens to be: ranks
that decided by asking their devices would issue different collectives, and hang. So a unit that left counts until
the limiter itself has waited for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from fsdp_core.comm.streams import Event
from fsdp_core.policy import RateLimit


class RateLimiter:
    """Counts units, not bytes. The root and units kept after their use never enter."""

    def __init__(self, limit: RateLimit) -> None:
        self.limit = limit
        self.max_inflight: int | None = None if limit.kind == "unlimited" else limit.max_inflight
        self._open: dict[Hashable, None] = {}  # gathered or gathering, reading computation not yet issued in full
        self._leaving: deque[Event] = deque()  # resharded; the device may still be computing
        self.peak_inflight = 0
        self.num_waits = 0

    @property
    def num_inflight(self) -> int:
        """How many there really are, for reports: this asks the device and must decide nothing."""
        return len(self._open) + sum(1 for event in self._leaving if not event.has_happened())

    def _is_full(self) -> bool:
        return self.max_inflight is not None and len(self._open) + len(self._leaving) >= self.max_inflight

    def make_room(self, num_spared: int) -> bool:
        """Is there room for a gather that is not needed yet? Waits for finished computations, but not for the
        ``num_spared`` that left last: the device may just have begun with those, and would run dry meanwhile."""
        while self._is_full() and len(self._leaving) > num_spared:
            self._wait_for_oldest()
        return not self._is_full()

    def enter(self, key: Hashable) -> bool:
        """A gather that is needed now. Waits for finished computations; false if the limit is exceeded because
        all units in flight are still open (units nested deeper than the limit), which must not deadlock."""
        within = self.make_room(num_spared=0)
        self._open[key] = None
        self.peak_inflight = max(self.peak_inflight, len(self._open) + len(self._leaving))
        return within

    def leave(self, key: Hashable, event: Event) -> None:
        """The unit's reading computation has been issued; ``event`` is behind it. Unknown keys are ignored."""
        if key in self._open:
            del self._open[key]
            if self.max_inflight is not None and not event.is_immediate:
                self._leaving.append(event)

    def reset(self) -> None:
        """A new pass: nothing that was open is any more."""
        self._open.clear()

    def _wait_for_oldest(self) -> None:
        event = self._leaving.popleft()
        if not event.has_happened():
            self.num_waits += 1
            event.synchronize()
