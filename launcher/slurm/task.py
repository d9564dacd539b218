"""One task of a job step: ``srun python -m launcher.slurm.task --run-dir DIR``. Two processes: a rank and its keeper.

The keeper sees how the rank ends, a SIGKILL or the kernel's out-of-memory killer included, and writes it down beside
the run. It fails the task if the rank failed, so that srun ends the step; a rank that saved on a signal is no failure.
SLURM sends its signals to both; the keeper leaves them to the rank. A rank that SIGTERM ended while one waits for the
keeper, too, was ended by srun: another rank is to blame. If the keeper goes, the rank goes with it.

A node that was cut off may keep its ranks alive while SLURM starts the job again elsewhere. The keeper looks into the
run folder every few seconds and ends its rank once a later start is on record there.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from launcher import failure as failures
from launcher import oom_kills, parent_death, rank_signals
from launcher.errors import EXIT_HANG, EXIT_OK, EXIT_SAVED, EXIT_USAGE
from launcher.failure import Failure
from launcher.hang import REPORT_FILE
from launcher.rank_signals import SignalWatch, Told
from launcher.slurm import records
from launcher.slurm.records import RankEnd
from launcher.slurm.step import Step, step_of
from launcher.status_pipe import Status, StatusReader, StatusWriter
from launcher.streams import make_streams_safe
from launcher.worker import overdue

# Of one keeper; all of them together look a few hundred times a second, whatever W is.
_LOOK_S, _LOOKS_PER_S = 2.0, 300
_ENDED_BY_TERM = (-signal.SIGTERM, rank_signals.exit_code_of(signal.SIGTERM))
_KEPT_SIGNALS = (*rank_signals.STOP_SIGNALS, signal.SIGCHLD)


def main() -> NoReturn:
    arguments = _parser().parse_args()
    step = step_of()
    if step is None:
        print(
            "this is the entry of a rank that srun starts; fsdp-launch cluster=slurm ... submits a run", file=sys.stderr
        )
        sys.exit(EXIT_USAGE)
    if step.rank == 0:
        records.add(arguments.run_dir, "started", job=step.public_id, restart=step.restart, node=socket.gethostname())
    later_start = LaterStart(arguments.run_dir, step)
    # Signals wait until both processes are ready for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT_SIGNALS)
    status = StatusReader()
    before = oom_kills.count()
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        _be_the_rank(step, arguments, StatusWriter(status.child_fd), keeper)
    status.started()
    returncode = _wait(pid, later_start.is_there, _LOOK_S + step.world_size / _LOOKS_PER_S)
    end = _end(arguments.run_dir, step.rank, returncode, status.latest(), oom_kills.count() > before)
    if end.failure is not None or step.rank == 0:
        records.write_rank_end(arguments.run_dir, step.public_id, step.restart, end)
    sys.exit(EXIT_OK if end.failure is None else end.failure.exit_code)


def _be_the_rank(step: Step, arguments: argparse.Namespace, status: StatusWriter, keeper: int) -> NoReturn:
    os.environ[parent_death.PARENT_PID_VARIABLE] = str(keeper)
    parent_death.die_with_launcher()
    make_streams_safe()
    signals = SignalWatch(Told(overdue(step.rank, status.failed), status.saving)).install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _KEPT_SIGNALS)
    # By name and now: this module imports torch.
    import_module("launcher.slurm.rank").run(step, arguments, status, signals)
    raise AssertionError("a rank leaves by itself")


class LaterStart:
    """Whether a start of this run after our own is on record. Until our own was seen there, nothing later can be."""

    def __init__(self, run_dir: Path, step: Step) -> None:
        self._run_dir, self._own = run_dir, (step.public_id, step.restart)
        self._seen = False
        self.is_there()

    def is_there(self) -> bool:
        story = records.story(self._run_dir)
        is_ours = (story.job, story.restart) == self._own
        self._seen = self._seen or is_ours
        return self._seen and not is_ours and story.restart is not None


def _wait(pid: int, is_superseded: Callable[[], bool], look_s: float) -> int:
    """How the rank ended, as subprocess has it. Signals but for a child's end stay blocked: they are the rank's."""
    look_at = time.monotonic() + look_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= look_at:
            if is_superseded():
                os.kill(pid, signal.SIGKILL)
            look_at = time.monotonic() + look_s
        signal.sigtimedwait([signal.SIGCHLD], min(1.0, look_s))


def _end(run_dir: Path, rank: int, returncode: int, status: Status | None, is_out_of_memory_kill: bool) -> RankEnd:
    host = socket.gethostname()
    if status is not None and status.is_done and returncode in (EXIT_OK, EXIT_SAVED):
        return RankEnd(rank, records.DONE if returncode == EXIT_OK else records.SAVED, host=host)
    failure: Failure | None = None if status is None else status.failure
    if failure is None and returncode == EXIT_HANG:
        failure = _hang(rank, run_dir)
    if failure is None:
        failure = failures.from_exit(rank, returncode, is_out_of_memory_kill)
        if returncode in _ENDED_BY_TERM and signal.SIGTERM in signal.sigpending():
            failure = replace(failure, kind="lost_peer")  # srun ended it because of another one
    return RankEnd(rank, records.FAILED, failure, host)


def _hang(rank: int, run_dir: Path) -> Failure:
    """The ranks found that nobody makes progress, and one of them has written why."""
    try:
        report = (run_dir / REPORT_FILE).read_text()
    except OSError:
        report = ""
    return Failure(rank, "the run hangs", EXIT_HANG, time.time(), traceback=report)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launcher.slurm.task", description="one rank; started by srun")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--plugin", action="append", default=[])
    return parser


if __name__ == "__main__":
    main()
