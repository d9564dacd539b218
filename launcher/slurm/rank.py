"""A rank under srun, from the stored config to the recipe's end. It tells its keeper how it went, and the job's log."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from launcher import failure as failures
from launcher import provenance
from launcher.announce import headline, say
from launcher.environment import JoinedRanks
from launcher.errors import ConfigErrors
from launcher.failure import Failure
from launcher.hang import backstop_s, watched
from launcher.log_tee import tee_output
from launcher.rank_run import rank_context, run_rank, stored_config
from launcher.rank_signals import SignalWatch
from launcher.rendezvous import Meeting, agreed_device
from launcher.run_folder import Lock, begin_logs, next_attempt, rank_log
from launcher.slurm.step import Step
from launcher.status_pipe import StatusWriter
from launcher.time_limit import seconds_of
from launcher.worker import GOOD_ENDS, guarded, leave

_THREAD_VARIABLE = "OMP_NUM_THREADS"
_LOCK_TRIES, _LOCK_PAUSE_S = 20, 0.5
_held = ExitStack()  # until the process ends
_STARTING_S = 10.0  # from the job's start to here


def run(step: Step, arguments: argparse.Namespace, status: StatusWriter, signals: SignalWatch) -> NoReturn:
    """The rank's whole life; ends the process."""
    faulthandler.enable()
    export(step)
    with tee_output(rank_log(arguments.run_dir, step.rank)):

        def report(failure: Failure) -> None:
            status.failed(failure)
            _print(failure)

        exit_code = guarded(step.rank, lambda: _train(step, arguments, signals), report)
        if exit_code in GOOD_ENDS:
            status.done()
        sys.stdout.flush()
        sys.stderr.flush()
    leave(exit_code)


def export(step: Step) -> None:
    """Variables by which other code, a user's plugin for one, knows its rank; threads, before torch looks at them."""
    os.environ.update(
        RANK=str(step.rank),
        WORLD_SIZE=str(step.world_size),
        LOCAL_RANK=str(step.local_rank),
        LOCAL_WORLD_SIZE=str(step.local_world_size),
    )
    cores = os.environ.get("SLURM_CPUS_PER_TASK")
    if cores is None:
        cores = str(max(1, int(os.environ.get("SLURM_CPUS_ON_NODE", "1")) // step.local_world_size))
    os.environ.setdefault(_THREAD_VARIABLE, cores)


def _train(step: Step, arguments: argparse.Namespace, signals: SignalWatch) -> int:
    config = stored_config(arguments.run_dir, arguments.plugin)
    if config.cluster.time_limit is not None:  # of each start; SLURM's own clock began a moment ago
        signals.stop.ends_at = time.monotonic() - _STARTING_S + seconds_of(config.cluster.time_limit)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, when CUDA starts
    meeting = Meeting.of_joined_ranks(JoinedRanks.of_step(step), backstop_s(config.cluster))
    device, hostnames = agreed_device(meeting, config.cluster.device, socket.gethostname())
    if step.rank == 0:
        _lock(arguments.run_dir, step)
        _describe_machine(arguments.run_dir)
        print(headline(arguments.run_dir, meeting.ranks, device.type, "started"), flush=True)
    # Counted in the folder, so that ranks of a lost node that linger know themselves to be of an older attempt.
    attempt = meeting.exchange(next_attempt(arguments.run_dir) if step.rank == 0 else None)[0]
    begin_logs(arguments.run_dir, [step.rank], attempt)
    context = rank_context(meeting.ranks, device, hostnames, arguments.run_dir, False, attempt, signals.stop)
    with watched(arguments.run_dir, config.cluster, meeting.ranks, attempt, hostnames[step.rank]):
        return run_rank(config, meeting, device, context, signals)


def _lock(run_dir: Path, step: Step) -> None:
    """Until this process ends, no run on this machine may use the folder either.

    A start that was cut off may hold the lock for as long as the file server believes in its node; SLURM has given the
    run to this one, so a restart goes on without.
    """
    for _ in range(_LOCK_TRIES):
        try:
            _held.enter_context(Lock(run_dir))
            return
        except ConfigErrors:
            time.sleep(_LOCK_PAUSE_S)
    if step.restart == 0:
        _held.enter_context(Lock(run_dir))
    say("an earlier start still holds the run folder's lock: going on without it")


def _describe_machine(run_dir: Path) -> None:
    """In place of the machine that submitted: this is where the run computes."""
    facts = provenance.environment(os.environ)
    (run_dir / "environment.json").write_text(json.dumps(facts, indent=2) + "\n")


def _print(failure: Failure) -> None:
    """Ranks that only noticed another one's end stay quiet: what they would say explains nothing."""
    if failure.is_lost_peer:
        return
    say(failures.told_by_its_rank(failure))
