"""Cap on gathers in flight (paper section 3.4): from issue until the computation that reads them has finished.

Pure bookkeeping over events: the limiter neither gathers nor frees. A unit *enters* when its gather is issued and
*leaves*, with an event of the compute stream, when it is resharded (or turns out to be kept). Only an event that
has not happened yet makes the host wait, and only as long as needed for one permit.
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
        self._drop_happened()
        return len(self._open) + len(self._leaving)

    def has_room(self) -> bool:
        """Would a prefetch be within the limit right now, without waiting?"""
        return self.max_inflight is None or self.num_inflight < self.max_inflight

    def enter(self, key: Hashable) -> bool:
        """A gather that is needed now. Waits for finished computations; false if the limit is exceeded because
        all units in flight are still open (units nested deeper than the limit), which must not deadlock."""
        within = True
        if self.max_inflight is not None:
            while self.num_inflight >= self.max_inflight and self._leaving:
                self.num_waits += 1
                self._leaving.popleft().synchronize()
            within = self.num_inflight < self.max_inflight
        self._open[key] = None
        self.peak_inflight = max(self.peak_inflight, len(self._open) + len(self._leaving))
        return within

    def leave(self, key: Hashable, event: Event) -> None:
        """The unit's reading computation has been issued; ``event`` is behind it. Unknown keys are ignored."""
        if key in self._open:
            del self._open[key]
            if not event.has_happened():
                self._leaving.append(event)

    def reset(self) -> None:
        """A new pass: nothing that was open is any more."""
        self._open.clear()

    def _drop_happened(self) -> None:
        while self._leaving and self._leaving[0].has_happened():
            self._leaving.popleft()
