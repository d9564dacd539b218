"""Runs a sweep's jobs to their end: feeds the backend, tells what happens, keeps the results current."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from launcher.announce import say, short
from launcher.errors import EXIT_OK, EXIT_SAVED, EXIT_SWEEP_FAILED
from launcher.rank_signals import STOP_SIGNALS, exit_code_of
from launcher.sweep import record, states, table
from launcher.sweep.backends import Backend, Event
from launcher.sweep.folder import Sweep
from launcher.sweep.record import Job
from launcher.sweep.results import write_results

_POLL_S = 0.5
_RESULTS_EVERY_S = 2.0


class Feed(Protocol):
    """Where jobs come from: all at once (a grid), or as results come in (a search)."""

    def more(self, num_open: int) -> list[Job]:
        """Jobs to start now, while ``num_open`` are under way."""

    def ended(self, job: Job) -> None: ...


class Listed:
    """A feed of jobs that are known before."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = list(jobs)

    def more(self, num_open: int) -> list[Job]:
        jobs, self._jobs = self._jobs, []
        return jobs

    def ended(self, job: Job) -> None:
        """Nothing depends on it."""


def drive(sweep: Sweep, backend: Backend, feed: Feed, *, waits: bool = True) -> int:
    """Returns the sweep's exit code when every job has ended. The caller holds the sweep's lock.

    waits: false returns as soon as the jobs are submitted, where they go on without this program.
    """
    if backend.outlives and not waits:
        return _submit(sweep, backend, feed)
    with _stop_signals() as received:
        drive = _Drive(sweep, backend, feed, received)
        try:
            drive.until_the_end()
        finally:
            drive.leave_nobody()
    try:
        found = write_results(sweep)
    except OSError as error:
        say(f"the results cannot be written: {error.strerror or error}, {error.filename or sweep.path}")
        return EXIT_SWEEP_FAILED
    say(table.as_text(found), sys.stdout)
    if line := table.unknown_metric(found):
        say(line)
    say(_last_lines(sweep, found.jobs))
    if received:
        saved = any(job.state == states.PREEMPTED for job in found.jobs)
        return EXIT_SAVED if saved and received[0] != signal.SIGINT else exit_code_of(received[0])
    return EXIT_SWEEP_FAILED if drive.is_broken else exit_code(found.jobs)


def _submit(sweep: Sweep, backend: Backend, feed: Feed) -> int:
    backend.submit(feed.more(0))
    for line in backend.describe():
        say(line, sys.stdout)
    write_results(sweep)
    say(f"to see what becomes of them: {command(sweep, 'status')}", sys.stdout)
    return EXIT_OK


def exit_code(jobs: Sequence[Job]) -> int:
    """0: all are done; 75: some were saved and can go on; 4: some have failed or are missing."""
    found = {job.state for job in jobs} - {states.DONE}
    if not found:
        return EXIT_OK
    return EXIT_SAVED if found == {states.PREEMPTED} else EXIT_SWEEP_FAILED


class _Drive:
    def __init__(self, sweep: Sweep, backend: Backend, feed: Feed, received: list[int]) -> None:
        self._sweep, self._backend, self._feed, self._received = sweep, backend, feed, received
        self._open: set[int] = set()
        self._num_ended = self._num_stops = 0
        self._is_failing = False
        self.is_broken = False  # jobs may be missing from the results
        self._results_at = 0.0

    def until_the_end(self) -> None:
        is_first = True
        while True:
            self._heed_signals()
            jobs = [] if self._is_stopping else self._feed.more(len(self._open))
            if jobs:
                self._backend.submit(jobs)
                self._open.update(job.number for job in jobs)
                for line in self._backend.describe() if is_first else ():
                    say(line)
                is_first = False
            elif not self._backend.is_busy:
                return
            try:
                for event in self._backend.poll(_POLL_S):
                    self._tell(event)
                self._refresh()
            except OSError as error:  # a full disk: without records there is no sweep
                self.is_broken = True
                self._give_up(
                    f"the sweep cannot go on: {error.strerror or error}, {error.filename or self._sweep.path}"
                )

    def leave_nobody(self) -> None:
        """However this ends, no job that dies with this program outlives it."""
        if self._backend.outlives:
            return
        while self._backend.is_busy:
            self._backend.stop(signal.SIGKILL)
            self._backend.poll(_POLL_S)

    @property
    def _is_stopping(self) -> bool:
        return bool(self._received) or self._is_failing

    def _heed_signals(self) -> None:
        if len(self._received) > self._num_stops:
            self._num_stops = len(self._received)
            name = signal.Signals(self._received[-1]).name
            again = "ending them at once" if self._num_stops > 1 else "no further job starts, those that run are ended"
            say(f"{name}: {again}")
            self._backend.stop(self._received[-1])

    def _tell(self, event: Event) -> None:
        job = record.reread(self._sweep.path / "jobs" / f"{event.number:04d}")
        if event.what != "ended":
            say(f"job {job.number} {event.note or event.what}  {swept_words(job)}".rstrip())
            return
        self._open.discard(job.number)
        self._num_ended += 1
        self._feed.ended(job)
        num_jobs = self._num_ended + len(self._open)
        parts = [f"[{self._num_ended}/{num_jobs}] job {job.number} {job.state}", *_figures(job), swept_words(job)]
        say("  ".join(part for part in parts if part))
        if job.state in states.UNWELL:
            say(f"    {table.error_line(job) or 'see its log'}\n    log: {short(job.log)}")
            if self._sweep.asked.fail_fast:
                self._give_up("sweep.fail_fast: ending the other jobs")

    def _give_up(self, why: str) -> None:
        if not self._is_stopping:
            say(why)
            self._is_failing = True
            self._backend.stop(signal.SIGTERM)

    def _refresh(self) -> None:
        if self._open and time.monotonic() >= self._results_at:
            write_results(self._sweep)
            self._results_at = time.monotonic() + _RESULTS_EVERY_S


def swept_words(job: Job) -> str:
    return " ".join(f"{key}={table.one_line(value)}" for key, value in job.swept.items())


def _figures(job: Job) -> list[str]:
    measures = {} if job.end is None else job.end.measures
    shown = [name for name in ("train_loss", "eval_loss") if name in measures]
    figures = [f"{table.title(name)} {table.readable(name, measures[name])}" for name in shown]
    return [*figures, "" if job.seconds is None else table.readable("seconds_s", job.seconds)]


def _last_lines(sweep: Sweep, jobs: Sequence[Job]) -> str:
    lines = [table.counts(jobs)]
    commands = (
        ("resume", states.MISSING, "to run what is missing"),
        ("retry", states.UNWELL, "to run the failed ones again"),
    )
    for do, wanted, why in commands:
        if any(job.state in wanted for job in jobs):
            lines.append(f"{why}: {command(sweep, do)}")
    return "\n".join([*lines, f"results: {short(sweep.path / 'results.csv')}, {short(sweep.path / 'report.html')}"])


def command(sweep: Sweep, do: str) -> str:
    """What a user types for it."""
    plugins = f" plugins='[{','.join(sweep.asked.plugins)}]'" if sweep.asked.plugins else ""
    return f"fsdp-launch action=sweep sweep.dir={short(sweep.path)} sweep.do={do}{plugins}"


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects stop signals instead of dying of them; one that was ignored stays ignored."""
    received: list[int] = []

    def receive(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    before = {
        signum: signal.signal(signum, receive)
        for signum in STOP_SIGNALS
        if signal.getsignal(signum) is not signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
