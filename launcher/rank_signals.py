"""Signals inside a rank.

===========================  =====================================================================================
SIGTERM, SIGUSR1, SIGUSR2    a request: a flag that the loop reads at step boundaries, where all ranks agree on it,
                             save and leave together. A rank that reaches none within the grace period ends itself
SIGINT, SIGHUP               somebody wants it to end: unwinds the run through its ``finally`` blocks
a second one                 ends the rank at once
===========================  =====================================================================================

A Python handler runs only when the main thread is back in Python, and a rank may stand in a collective that never
ends. So the interpreter's own part, which runs at once, also writes the signal's number into a pipe, and a thread
reads it there: that thread keeps the clock and, at the end of it, ends the process.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from recipes.stop import StopRequest

REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ENDINGS = (signal.SIGINT, signal.SIGHUP)
STOP_SIGNALS = (*ENDINGS, *REQUESTS)
STACKS_SIGNAL = signal.SIGQUIT  # the rank writes the Python stacks of its threads into its log and goes on
DEFAULT_GRACE_S = 60.0  # until the config has been read
# A scheduler and our launcher may both pass one request on to every process: that is still one request.
SAME_REQUEST_S = 1.0
_WAKE_S = 0.05


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by the first SIGINT or SIGHUP."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        return exit_code_of(self.signum)


@dataclass(frozen=True)
class Told:
    """Whom the watching thread tells, before it acts.

    overdue: gets a line: this rank ends itself without saving.
    heeded: the ranks have agreed and begin to save, which may take longer than the grace period.
    """

    overdue: Callable[[str], None]
    heeded: Callable[[], None]


def exit_code_of(signum: int) -> int:
    """128 + n, as shells do: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + signum


class SignalWatch:
    """This process's stop signals. ``stop`` is what the loop reads; ``grace_s`` may be set later."""

    def __init__(self, told: Told) -> None:
        self.stop = StopRequest()
        self.grace_s = DEFAULT_GRACE_S
        self._told = told
        self._has_something_to_save = True
        self._first: tuple[int, float] | None = None  # (signal, time) as the thread saw it

    def install(self) -> SignalWatch:
        """To be called before heavy imports: until then the default actions hold and end the process without a word.

        A signal that was ignored when the process started (``nohup``, a background job) stays ignored.
        """
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read_fd,), name="signals", daemon=True).start()
        for signum in _heard():
            signal.signal(signum, self._ask if signum in REQUESTS else self._interrupt)
        return self

    def nothing_to_save(self) -> None:
        """What this rank does leaves nothing that a later start goes on from: a request ends it as Ctrl-C does.

        Raises Interrupted if one has come already.
        """
        self._has_something_to_save = False
        if self.stop.why is not None:
            self._ask(signal.Signals[self.stop.why], None)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if not self._has_something_to_save:
            end_at_next()
            raise Interrupted(signum)
        self.stop.ask(signal.Signals(signum).name)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self.stop.why is not None:
            _end(signum, frame)
        end_at_next()
        raise Interrupted(signum)

    def _watch(self, read_fd: int) -> None:
        is_told = False
        while True:
            ready = select.select([read_fd], [], [], None if self._first is None or is_told else _WAKE_S)[0]
            for signum in os.read(read_fd, 64) if ready else b"":
                self._received(signum)
            if self._first is None or is_told:
                continue
            if self.stop.is_heeded:
                self._told.heeded()
                is_told = True
            elif time.monotonic() >= self._first[1] + self.grace_s and self._first[0] in REQUESTS:
                self._end_overdue(self._first[0])

    def _received(self, signum: int) -> None:
        if signum not in STOP_SIGNALS:
            return
        now = time.monotonic()
        if self._first is None:
            self._first = (signum, now)
            if signum in REQUESTS:
                self.stop.ask(signal.Signals(signum).name)
        elif signum not in REQUESTS or self._first[0] not in REQUESTS or now - self._first[1] > SAME_REQUEST_S:
            os._exit(exit_code_of(signum))

    def _end_overdue(self, signum: int) -> None:
        name = signal.Signals(signum).name
        self._told.overdue(
            f"was asked to stop by {name} and reached no step boundary within {self.grace_s:g} s (cluster.grace_s): "
            "ended without saving"
        )
        os._exit(exit_code_of(signum))


def end_at_next() -> None:
    """Once a rank is on its way out there is nothing left to unwind: the next signal ends it at once."""
    for signum in _heard():
        signal.signal(signum, _end)


def ignore_all() -> None:
    """At the very end: a late signal must not turn a finished run into a failed one."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _heard() -> list[signal.Signals]:
    return [signum for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]


def _end(signum: int, frame: FrameType | None) -> None:
    os._exit(exit_code_of(signum))
