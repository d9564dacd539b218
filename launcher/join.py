"""Joining ranks that somebody else started: torchrun, or anything that sets RANK and WORLD_SIZE, on several hosts too.

Every rank has composed and checked the same config by itself. Rank 0 decides the run folder and tells the others; if
it cannot, every rank leaves with the same exit code and rank 0 alone says why.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from launcher import failure as failures
from launcher import provenance, rank_signals, resuming
from launcher.announce import headline, let_the_first_rank_speak, say
from launcher.environment import JoinedRanks
from launcher.errors import EXIT_OK, EXIT_USAGE
from launcher.failure import Failure
from launcher.hang import backstop_s, watched
from launcher.log_tee import tee_output
from launcher.rank_run import rank_context, run_rank
from launcher.rank_signals import SignalWatch
from launcher.rendezvous import Meeting, agreed_device
from launcher.request import LaunchRequest
from launcher.run_folder import Lock, begin_logs, decide, next_attempt, open_named, rank_log, usable
from launcher.schema import Config
from launcher.time_limit import seconds_of
from launcher.worker import guarded, leave

# torchrun reads a failed rank's record from this file and names the earliest.
_TORCHRUN_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_SETTLE_S = 2.0


def join(config: Config, request: LaunchRequest, ranks: JoinedRanks, signals: SignalWatch) -> int:
    """This rank's whole life. Returns its exit code; a failed rank ends here, without the interpreter's long goodbye.

    Raises:
        ConfigErrors: the ranks cannot find each other; or, on rank 0 alone, the run folder cannot be used (the other
            ranks then return 2 without a word).
    """
    if config.cluster.time_limit is not None:
        signals.stop.ends_at = time.monotonic() + seconds_of(config.cluster.time_limit)
    os.environ.update(config.cluster.env)
    is_interactive = sys.stdout.isatty() and sys.stderr.isatty()
    meeting = Meeting.of_joined_ranks(ranks, backstop_s(config.cluster))
    with ExitStack() as held:
        agreed = _agree_on_run_dir(config, request, meeting, held)
        if agreed is None:
            let_the_first_rank_speak()
            return EXIT_USAGE
        run_dir, attempt = agreed
        begin_logs(run_dir, [ranks.rank], attempt)
        held.enter_context(tee_output(rank_log(run_dir, ranks.rank)))
        exit_code = guarded(
            ranks.rank, lambda: _run(config, meeting, run_dir, is_interactive, attempt, signals), _report
        )
        if exit_code != EXIT_OK:
            leave(exit_code)
        rank_signals.ignore_all()
    return EXIT_OK


def _run(
    config: Config, meeting: Meeting, run_dir: Path, is_interactive: bool, attempt: int, signals: SignalWatch
) -> int:
    device, hostnames = agreed_device(meeting, config.cluster.device, socket.gethostname())
    if meeting.ranks.rank == 0:
        print(headline(run_dir, meeting.ranks, device.type, "joined"), flush=True)
    context = rank_context(meeting.ranks, device, hostnames, run_dir, is_interactive, attempt, signals.stop)
    with watched(run_dir, config.cluster, meeting.ranks, attempt, hostnames[meeting.ranks.rank]):
        return run_rank(config, meeting, device, context, signals)


def _agree_on_run_dir(
    config: Config, request: LaunchRequest, meeting: Meeting, held: ExitStack
) -> tuple[Path, int] | None:
    """Rank 0's folder and the attempt, on every rank; None if rank 0 could not get one.

    After a restart by torchrun the same folder again.
    """
    if meeting.ranks.rank == 0:
        told: tuple[str, int] | None = None
        try:
            before = meeting.recall_run_dir()
            lines = resuming.lines(config) if before is None else []
            run_dir = decide(config, request) if before is None else open_named(before)
            held.enter_context(Lock(run_dir))
            with usable(run_dir):
                provenance.write(run_dir, request, config.plugins)
                lines += resuming.take_back(config, run_dir) if before is None else []
                attempt = next_attempt(run_dir)
            for line in lines:
                say(line)
            told = str(run_dir), attempt
            meeting.remember_run_dir(run_dir)
        finally:
            meeting.exchange(told)
        return run_dir, attempt
    told = meeting.exchange(None)[0]
    if told is None:
        return None
    run_dir, attempt = Path(told[0]), int(told[1])
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)  # another host may share no file system with rank 0's
    return run_dir, attempt


def _report(failure: Failure) -> None:
    """To people, and to torchrun in its own format."""
    if failure.is_lost_peer:
        # torchrun names the earliest by whole seconds: the cause goes first, and mostly ends this rank meanwhile.
        time.sleep(_SETTLE_S)
    say(failures.told_by_its_rank(failure))
    sys.stderr.flush()
    error_file = os.environ.get(_TORCHRUN_ERROR_FILE)
    if error_file:
        extra = {"py_callstack": failure.traceback, "timestamp": str(int(failure.time_s))}
        record = {"message": {"message": failure.what, "extraInfo": extra}}
        Path(error_file).write_text(json.dumps(record))
