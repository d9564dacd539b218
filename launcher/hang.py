"""A run that no longer makes progress: noticed from outside by the flight records of its ranks, explained, ended.

Where our launcher started the ranks it watches; ranks that somebody else started watch each other (``Watchdog``).
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from launcher.environment import JoinedRanks
from launcher.errors import EXIT_HANG
from launcher.failure import Failure
from launcher.processes import state_of
from launcher.rank_signals import STACKS_SIGNAL
from launcher.run_folder import flight_folder
from launcher.schema import ClusterConfig
from recipes.flight.report import GONE, STOPPED, UNKNOWN, HangReport, explain
from recipes.flight.watch import Watch

REPORT_FILE = "hang.txt"
_STACKS_S = 1.0  # for the writing of stacks
_NEXT_RANK_S = 2.0  # how long a rank waits for each lower one to speak


def watch_of(run_dir: Path, cluster: ClusterConfig, world_size: int, attempt: int) -> Watch:
    return Watch(
        flight_folder(run_dir),
        world_size=world_size,
        attempt=attempt,
        timeout_s=cluster.collective_timeout_s,
        slow_timeout_s=cluster.slow_phase_timeout_s,
    )


def backstop_s(cluster: ClusterConfig) -> float:
    """How long a collective may take before its library gives up: later than any hang report."""
    return 2 * max(cluster.collective_timeout_s, cluster.slow_phase_timeout_s) + 60


class HangWatch:
    """The launcher's: asked often, looks rarely."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._next_look = time.monotonic() + watch.poll_s

    def check(self, pids: Mapping[int, int]) -> Failure | None:
        """The hang, explained, if there is one. pids: of every rank's process."""
        if time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + self._watch.poll_s
        if not self._watch.is_hung():
            return None
        return hang_failure(self._watch, {rank: state_of(pid) for rank, pid in pids.items()})

    def close(self) -> None:
        self._watch.close()


def hang_failure(watch: Watch, states: Mapping[int, str]) -> Failure:
    report = explain(watch.rings(), states, time.time())
    return Failure(
        report.culprits[0] if report.culprits else 0,
        opening(watch),
        EXIT_HANG,
        time.time(),
        kind="hang",
        traceback=report.text,
    )


def opening(watch: Watch) -> str:
    """The first line of a report."""
    return f"the run hangs: no rank has made progress for {watch.silent_s:.0f} s (allowed: {watch.limit_s():g} s)"


@contextmanager
def watched(run_dir: Path, cluster: ClusterConfig, ranks: JoinedRanks, attempt: int, host: str) -> Iterator[None]:
    """A block in which this rank watches the others, since no launcher of ours does."""
    watchdog = Watchdog(watch_of(run_dir, cluster, ranks.world_size, attempt), ranks.rank, host, run_dir / REPORT_FILE)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


class Watchdog:
    """A thread in a rank that no launcher of ours watches: the lowest rank that still can tells it, then all end.

    The thread runs while the main one waits in a collective, which does not hold Python's lock.
    """

    def __init__(self, watch: Watch, rank: int, host: str, report_path: Path) -> None:
        self._watch, self._rank, self._host, self._report_path = watch, rank, host, report_path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hang-watch", daemon=True)

    def start(self) -> None:
        self._report_path.unlink(missing_ok=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._watch.close()

    def _work(self) -> None:
        while not self._stop.wait(self._watch.poll_s):
            if self._watch.is_hung() and self._is_still_hung_when_it_is_my_turn():
                self._end()

    def _is_still_hung_when_it_is_my_turn(self) -> bool:
        """Ranks speak from the lowest on; one that is stopped or dead leaves the word to the next."""
        states = self._states()
        before_me = [rank for rank in range(self._rank) if states[rank] not in (STOPPED, GONE)]
        deadline = time.monotonic() + min(30.0, _NEXT_RANK_S * len(before_me))
        while time.monotonic() < deadline and not self._report_path.exists():
            if self._stop.wait(0.1):
                return False
        return self._watch.is_hung()

    def _end(self) -> None:
        report = explain(self._watch.rings(), self._states(), time.time())
        if self._is_first(report):
            print(f"{opening(self._watch)}\n{report.text}", file=sys.stderr, flush=True)
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback(file=sys.__stderr__)
        os._exit(EXIT_HANG)

    def _is_first(self, report: HangReport) -> bool:
        """The report is kept in the run folder too, written by one rank."""
        try:
            with self._report_path.open("x") as file:
                file.write(f"{opening(self._watch)}\n{report.text}\n")
        except FileExistsError:
            return False
        except OSError:
            pass  # a folder that cannot be written: said twice is better than not at all
        return True

    def _states(self) -> dict[int, str]:
        rings = self._watch.rings()
        return {
            rank: UNKNOWN if ring is None or ring.host != self._host else state_of(ring.pid)
            for rank, ring in enumerate(rings)
        }


def write_stacks(processes: Mapping[int, int]) -> None:
    """Asks every rank for its stacks and gives it a moment; one that is stopped will not answer."""
    for pid in processes.values():
        try:
            os.kill(pid, STACKS_SIGNAL)
        except ProcessLookupError:
            pass
    time.sleep(_STACKS_S)
