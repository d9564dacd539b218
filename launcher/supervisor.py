"""Watches over the ranks of one host: the first failure ends all, a stop signal is passed on, nobody is left behind.

How a run ends here, in the order in which it is decided:

==========================================  ====================================================================
all ranks said "done"                       0, or 75 if all left with 75 (saved on a signal)
a rank failed, was killed or left early     the others get SIGKILL at once; the failure that came first counts
no rank makes progress any more             stacks into the logs, SIGKILL to all; 5, with a report of who is where
a stop signal, or the time limit            passed on to every rank: 75 if all saved and left with it; ranks that do
                                            not save by then get SIGKILL after the grace period; 128 + signal
a second stop signal                        SIGKILL to all at once
==========================================  ====================================================================
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from launcher import failure as failures
from launcher import oom_kills
from launcher.errors import EXIT_OK, EXIT_SAVED
from launcher.failure import Failure
from launcher.hang import HangWatch, write_stacks
from launcher.rank_output import Echo
from launcher.rank_process import RankCommand, RankProcess
from launcher.rank_signals import REQUESTS, SAME_REQUEST_S, STOP_SIGNALS, exit_code_of

_WAKE_S = 0.1  # ends of processes and signals wake the loop at once; this is for clocks
_SETTLE_S = 1.0  # how long a lost connection waits for its cause to show
INTERRUPT_GRACE_S = 5.0  # Ctrl-C: somebody sits and waits
_LAST_WORD_S = 1.0  # a rank ends itself at the end of its grace period, and says so


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended.

    failure: the first one, if a rank failed. stopped_by: what stopped them, if anything did; is_time_limit: that was
    ``cluster.time_limit``.
    """

    exit_code: int
    failure: Failure | None = None
    stopped_by: str | None = None
    is_time_limit: bool = False


@dataclass(frozen=True)
class Limits:
    """grace_s: what a signalled rank may take; time_limit_s: what the run may take, from its start; None: for ever.

    spent_s: what earlier attempts have taken of the time limit.
    """

    grace_s: float
    time_limit_s: float | None = None
    spent_s: float = 0.0

    @property
    def ends_at(self) -> float | None:
        """When an attempt that begins now must have ended, on the monotonic clock that processes of a host share."""
        return None if self.time_limit_s is None else time.monotonic() + self.time_limit_s - self.spent_s


def supervise(
    commands: Sequence[RankCommand],
    limits: Limits,
    say: Callable[[str], None],
    echo: Echo | None = None,
    hang_watch: HangWatch | None = None,
) -> Outcome:
    """Starts the ranks, waits for their end, and leaves no process behind, whatever happens.

    say: gets lines for people (the run is being stopped, and why).
    echo: shows the output of ``commands[0]``.
    hang_watch: looks at the ranks' flight records; None: a hang is not noticed.

    To be called from the thread that outlives the ranks (ranks die with the thread that started them).

    Raises:
        OSError: a process could not be started; those started before it are ended.
    """
    with _SignalInbox(echo) as inbox:
        watch = _Watch(limits, say, inbox, hang_watch)
        try:
            for command in commands:
                watch.processes.append(RankProcess(command, echo if command is commands[0] else None))
            return watch.until_the_end()
        finally:
            watch.end_all()
            if echo is not None:
                echo.finish()
            watch.log_failures()


class _Watch:
    def __init__(
        self, limits: Limits, say: Callable[[str], None], inbox: _SignalInbox, hang_watch: HangWatch | None
    ) -> None:
        self.processes: list[RankProcess] = []
        self._limits = limits
        self._say = say
        self._inbox = inbox
        self._hang_watch = hang_watch
        self._oom_kills_before = oom_kills.count()
        self._time_limit = limits.ends_at
        self._stop_signal: int | None = None
        self._stopped_by: str | None = None
        self._stopped_at = 0.0
        self._is_time_limit = False
        self._kill_at: float | None = None
        self._must_end_now = False

    def until_the_end(self) -> Outcome:
        while True:
            self._heed_signals_and_clocks()
            if self._stop_signal is not None:
                if all(process.returncode() is not None for process in self.processes):
                    return self._stopped(self._stop_signal)
            elif failure := self._first_failure():
                return Outcome(failure.exit_code, failure=failure)
            elif all(self._left_well(process) for process in self.processes):
                return Outcome(self._agreed_exit_code() or EXIT_OK)
            elif hang := self._hang():
                return Outcome(hang.exit_code, failure=hang)
            self._inbox.wait(_WAKE_S)

    def end_all(self) -> None:
        for process in self.processes:  # first all signals, then the waits: nobody trains on while another dies
            if process.returncode() is None:
                process.send(signal.SIGKILL)
        for process in self.processes:
            if not self._left_well(process):
                process.kill()
            process.close()

    def log_failures(self) -> None:
        """What a rank reported also belongs into its log; the rank itself leaves the telling to the launcher."""
        for process in self.processes:
            status = process.status()
            if status is not None and status.failure is not None:
                try:
                    with process.log_path.open("a") as log:
                        log.write(f"{status.failure.traceback or status.failure.what}\n")
                except OSError as error:  # a full disk may be what the rank failed of; the failure itself is told
                    self._say(f"rank {process.rank}: the log cannot be written: {error.strerror}")

    def _hang(self) -> Failure | None:
        if self._hang_watch is None:
            return None
        pids = {process.rank: process.pid for process in self.processes}
        hang = self._hang_watch.check(pids)
        if hang is not None:
            write_stacks({process.rank: process.pid for process in self.processes if process.returncode() is None})
        return hang

    def _heed_signals_and_clocks(self) -> None:
        for signum in self._inbox.take():
            if self._stop_signal is not None and self._is_same_request(signum):
                continue  # as from ``timeout``, which signals its child and then the child's whole group
            if self._stop_signal is not None:
                self._say(f"{signal.Signals(signum).name} again: ending the ranks at once")
                self._kill_at, self._must_end_now = 0.0, True
            else:
                self._stop(signum, signal.Signals(signum).name)
        now = time.monotonic()
        if self._time_limit is not None and self._stop_signal is None and now >= self._time_limit:
            self._is_time_limit = True
            self._stop(signal.SIGTERM, f"the time limit of {self._limits.time_limit_s:g} s (cluster.time_limit)")
        if self._kill_at is not None and now >= self._kill_at:
            for process in self.processes:
                if self._must_end_now or not self._is_saving(process):
                    process.send(signal.SIGKILL)

    def _stop(self, signum: int, why: str) -> None:
        is_interrupt = signum == signal.SIGINT
        grace_s = min(INTERRUPT_GRACE_S, self._limits.grace_s) if is_interrupt else self._limits.grace_s
        again = "; Ctrl-C again ends them at once" if is_interrupt else ""
        self._say(f"stopped by {why}: the ranks have {grace_s:g} s to leave{again}")
        self._stop_signal, self._stopped_by, self._stopped_at = signum, why, time.monotonic()
        self._kill_at = time.monotonic() + grace_s + (0.0 if is_interrupt else _LAST_WORD_S)
        for process in self.processes:
            process.send(signum)

    def _is_same_request(self, signum: int) -> bool:
        is_request = signum in REQUESTS and self._stop_signal in REQUESTS
        return is_request and not self._is_time_limit and time.monotonic() - self._stopped_at <= SAME_REQUEST_S

    def _stopped(self, signum: int) -> Outcome:
        agreed = self._agreed_exit_code()
        code = exit_code_of(signum) if agreed is None else agreed
        return Outcome(code, stopped_by=self._stopped_by, is_time_limit=self._is_time_limit)

    def _agreed_exit_code(self) -> int | None:
        """0 or 75 if every rank left with it and said so, else None."""
        codes = {process.returncode() for process in self.processes}
        if all(self._left_well(process) for process in self.processes) and len(codes) == 1:
            return codes.pop()
        return None

    @staticmethod
    def _is_saving(process: RankProcess) -> bool:
        """All ranks have agreed to stop and write what they trained: that takes what it takes."""
        status = process.status()
        return status is not None and status.is_saving

    @staticmethod
    def _left_well(process: RankProcess) -> bool:
        status = process.status()
        return process.returncode() in (EXIT_OK, EXIT_SAVED) and status is not None and status.is_done

    def _first_failure(self) -> Failure | None:
        """The failure that explains the run's end. A lost connection alone waits a moment for its cause."""
        deadline = time.monotonic() + _SETTLE_S
        while found := self._failures():
            first = failures.first(found)
            if not first.is_lost_peer or time.monotonic() >= deadline or len(found) == len(self.processes):
                return first
            self._inbox.wait(_WAKE_S)
        return None

    def _failures(self) -> list[Failure]:
        found = []
        for process in self.processes:
            returncode, status = process.returncode(), process.status()
            if status is not None and status.failure is not None:
                found.append(status.failure)
            elif returncode is not None and not self._left_well(process):
                is_oom = oom_kills.count() > self._oom_kills_before
                found.append(failures.from_exit(process.rank, returncode, is_oom))
        return found


class _SignalInbox:
    """Collects stop signals while the ranks run, wakes the loop for them and for children that ended.

    Outside the main thread Python delivers no signals; then only the clock wakes the loop.
    """

    def __init__(self, echo: Echo | None) -> None:
        self._echo = echo
        self._received: list[int] = []
        self._before: dict[int, Any] = {}
        self._read_fd = self._write_fd = -1
        self._previous_wakeup_fd = -1
        self._is_main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> _SignalInbox:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        if self._is_main:
            self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
            for signum in (*STOP_SIGNALS, signal.SIGCHLD, signal.SIGWINCH):
                if signum == signal.SIGCHLD or signal.getsignal(signum) is not signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self._is_main:
            signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def wait(self, seconds: float) -> None:
        """Until a signal comes or the time is over."""
        if select.select([self._read_fd], [], [], seconds)[0]:
            try:
                os.read(self._read_fd, 4096)
            except BlockingIOError:
                pass

    def take(self) -> list[int]:
        """Stop signals since the last call, in their order."""
        received, self._received = self._received, []
        return received

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if signum in STOP_SIGNALS:
            self._received.append(signum)
        elif signum == signal.SIGWINCH and self._echo is not None:
            self._echo.match_size()
