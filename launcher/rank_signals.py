"""Signals inside a rank: the first one unwinds the run through its ``finally`` blocks, the second ends it at once."""

from __future__ import annotations

import os
import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STACKS_SIGNAL = signal.SIGQUIT  # the rank writes the Python stacks of its threads into its log and goes on


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by the first stop signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        return exit_code_of(self.signum)


def exit_code_of(signum: int) -> int:
    """128 + n, as shells do: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + signum


def install() -> None:
    """To be called before heavy imports: until then the default actions hold and end the process without a word.

    A signal that was ignored when the process started (``nohup``, a background job) stays ignored.
    """
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _first)


def end_at_next() -> None:
    """Once a rank is on its way out there is nothing left to unwind: the next signal ends it at once."""
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _second)


def ignore_all() -> None:
    """At the very end: a late signal must not turn a finished run into a failed one."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _first(signum: int, frame: FrameType | None) -> None:
    end_at_next()
    raise Interrupted(signum)


def _second(signum: int, frame: FrameType | None) -> None:
    os._exit(exit_code_of(signum))
