"""Entry of one rank that the local launcher starts: ``python -m launcher.worker --run-dir DIR``.

Light on purpose: ties to the launcher and signal handlers come first, torch only then (importing it takes seconds, and
a signal in that time must end the rank with a word, too).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from launcher import failure as failures
from launcher import parent_death, rank_signals
from launcher.errors import EXIT_OK, EXIT_RANK_FAILED, EXIT_SAVED
from launcher.failure import Failure
from launcher.rank_signals import STACKS_SIGNAL, SignalWatch, Told
from launcher.status_pipe import StatusWriter
from launcher.streams import make_streams_safe

GOOD_ENDS = (EXIT_OK, EXIT_SAVED)
_OWN_FOLDER = Path(__file__).parent


def main(run: Callable[[argparse.Namespace, SignalWatch], int] | None = None) -> NoReturn:
    """run: what this rank does with its arguments, to its exit code; by default a rank of the training recipe."""
    parent_death.die_with_launcher()
    make_streams_safe()
    status, rank = StatusWriter.from_environment(), int(os.environ["RANK"])
    signals = rank_signals.SignalWatch(Told(overdue(rank, status.failed), status.saving)).install()
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    arguments = _parser().parse_args()
    exit_code = guarded(rank, lambda: (run or _run_recipe)(arguments, signals), status.failed)
    if exit_code in GOOD_ENDS:
        status.done()
    leave(exit_code)


def _run_recipe(arguments: argparse.Namespace, signals: SignalWatch) -> int:
    # By name and now: this module imports torch.
    return import_module("launcher.rank_run").run_local_rank(arguments, signals)


def overdue(rank: int, report: Callable[[Failure], None]) -> Callable[[str], None]:
    """For a rank that ends itself because it was asked to stop and could not."""
    return lambda what: report(Failure(rank, what, EXIT_RANK_FAILED, time.time()))


def guarded(rank: int, work: Callable[[], int], report: Callable[[Failure], None]) -> int:
    """Runs ``work`` and returns this rank's exit code, ``work``'s own if it returns; however it fails, ``report``
    gets the record."""
    try:
        return work()
    except rank_signals.Interrupted as stop:
        report(Failure(rank, f"was {stop}", EXIT_RANK_FAILED, time.time()))
        return stop.exit_code
    except BaseException as error:  # SystemExit too: a rank that leaves early leaves the others waiting
        rank_signals.end_at_next()
        failure = failures.from_exception(rank, error, users_traceback(error))
        report(failure)
        return failure.exit_code


def users_traceback(error: BaseException) -> str:
    """The traceback from where the launcher's own frames end: how a rank came to run says nothing about its error."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next and Path(frames.tb_frame.f_code.co_filename).parent == _OWN_FOLDER:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def leave(exit_code: int) -> NoReturn:
    """Ends the process: after a good end as Python does, otherwise at once.

    A failed rank may hold collectives that never end and threads that wait for them.
    """
    rank_signals.ignore_all()
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_code == EXIT_OK:
        sys.exit(EXIT_OK)
    os._exit(exit_code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launcher.worker", description="one rank; started by fsdp-launch")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--attempt", type=int, default=1, help="how often ranks were started in the run folder")
    parser.add_argument("--ends-at", type=float, help="when the time limit is over, on this host's monotonic clock")
    parser.add_argument("--plugin", action="append", default=[])
    parser.add_argument("--listen-fd", type=int, help="rank 0: the rendezvous' socket, already listening")
    parser.add_argument("--interactive", action="store_true", help="rank 0: its output is shown on a terminal")
    return parser


if __name__ == "__main__":
    main()
