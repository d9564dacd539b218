"""Asking a run to stop from outside, between two steps. No torch here: signal handlers write this while torch loads."""

from __future__ import annotations

import time


class StopRequest:
    """One rank's wish that the run stops: set by a signal handler or a clock, read by the loop at step boundaries.

    Plain attributes and no lock, so that a handler may write them at any moment.

    why: what asks, in words (``SIGTERM``); None: nothing does.
    asked_at: when, on the clock of ``time.monotonic``.
    is_heeded: the loop has reached a boundary and the ranks have agreed to stop; from now on the run is saving.
    ends_at: moment of ``time.monotonic`` at which the run must have left (``cluster.time_limit``); None: none.
    """

    def __init__(self, ends_at: float | None = None) -> None:
        self.why: str | None = None
        self.asked_at: float | None = None
        self.is_heeded = False
        self.ends_at = ends_at

    def ask(self, why: str) -> None:
        """The first one counts."""
        if self.why is None:
            self.asked_at = time.monotonic()
            self.why = why

    def heed(self) -> None:
        self.is_heeded = True


class StoppedFromOutside(Exception):
    """The run stopped at a step boundary because it was asked to, on every rank alike, and can be continued.

    step: optimizer steps done; what was trained is saved.
    """

    def __init__(self, why: str, step: int) -> None:
        super().__init__(f"stopped after step {step} by {why}")
        self.why, self.step = why, step
