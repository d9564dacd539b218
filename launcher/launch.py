"""``launch``: from a checked config to an exit code.

A plain start makes the run folder, starts the ranks of this host as fresh processes and watches over them. Where
ranks exist already (RANK and WORLD_SIZE are set), this process is one of them and joins.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path

from launcher import failure as failures
from launcher import provenance, restarts, resuming, run_folder
from launcher.announce import headline, say, short
from launcher.device import choose_device, torch_cuda_version
from launcher.environment import JoinedRanks, joined_ranks
from launcher.errors import ConfigErrors, Problem
from launcher.hang import HangWatch, watch_of
from launcher.machine import num_cores, num_gpus
from launcher.rank_output import Echo
from launcher.rank_plan import LOOPBACK, rank_commands
from launcher.rank_signals import SignalWatch, Told
from launcher.request import LaunchRequest
from launcher.schema import Config
from launcher.supervisor import Limits, Outcome, supervise
from launcher.time_limit import seconds_of


def launch(
    config: Config,
    request: LaunchRequest,
    environ: Mapping[str, str] = os.environ,
    on_end: Callable[[Outcome], None] | None = None,
) -> int:
    """Runs ``config`` and returns the exit code (design: 0 done, 1 a rank failed, 6 out of memory, 128 + signal).

    on_end: is told how the ranks that this process started ended, for good.

    Raises:
        ConfigErrors: something that only shows now: the run folder cannot be used, the GPUs are not there.
    """
    joined = joined_ranks(environ)
    if joined is not None:
        told = Told(lambda what: say(f"rank {joined.rank}: {what}"), heeded=lambda: None)
        signals = SignalWatch(told).install()  # before torch: importing it takes seconds
        # By name and now: this module imports torch, which composing, checking and the local launcher do without.
        return import_module("launcher.join").join(config, request, joined, signals)
    outcome = _launch_here(config, request, environ)
    if on_end is not None:
        on_end(outcome)
    return outcome.exit_code


def _launch_here(config: Config, request: LaunchRequest, environ: Mapping[str, str]) -> Outcome:
    device, why_cpu = _device(config)
    world_size = config.cluster.nproc_per_node
    ranks = JoinedRanks(rank=0, world_size=world_size, local_rank=0, local_world_size=world_size)
    lines = resuming.lines(config)
    run_dir = run_folder.decide(config, request)
    with run_folder.Lock(run_dir):
        try:
            with run_folder.usable(run_dir):
                provenance.write(run_dir, request, config.plugins)
                lines += resuming.take_back(config, run_dir)
        except BaseException:
            run_folder.discard_if_unused(run_dir)
            raise
        for line in lines if why_cpu is None else [why_cpu, *lines]:
            say(line)
        say(headline(run_dir, ranks, device, "started"), sys.stdout)
        return _with_restarts(config, run_dir, device, environ)


def _with_restarts(config: Config, run_dir: Path, device: str, environ: Mapping[str, str]) -> Outcome:
    """Attempts until one ends well, or no further one is allowed or could help; each end is told. The last counts."""
    cluster = config.cluster
    started = time.monotonic()
    limit_s = None if cluster.time_limit is None else float(seconds_of(cluster.time_limit))
    for num_restarts in itertools.count():
        with run_folder.usable(run_dir):
            attempt = run_folder.next_attempt(run_dir)
            run_folder.begin_logs(run_dir, range(cluster.nproc_per_node), attempt)
        limits = Limits(cluster.grace_s, limit_s, spent_s=time.monotonic() - started)
        outcome = _run(config, run_dir, device, environ, attempt, limits)
        _tell_the_end(outcome, config, run_dir)
        failure = outcome.failure
        if failure is None or num_restarts == cluster.max_restarts or not restarts.may_help(failure):
            return outcome
        seconds = restarts.pause_s(num_restarts + 1)
        if limit_s is not None and time.monotonic() - started + seconds >= limit_s:
            return outcome
        say(restarts.announcement(num_restarts + 1, cluster.max_restarts, attempt + 1, seconds))
        time.sleep(seconds)  # nobody is there to be ended: a stop signal simply ends the launcher
    raise AssertionError("counting has no end")


def _run(
    config: Config,
    run_dir: Path,
    device: str,
    environ: Mapping[str, str],
    attempt: int,
    limits: Limits,
) -> Outcome:
    """One attempt: its own port, its own processes."""
    echo = Echo(run_folder.rank_log(run_dir, 0))
    with closing(listening_socket()) as listener:
        commands = rank_commands(
            run_dir,
            config.plugins,
            config.cluster,
            attempt=attempt,
            ends_at=limits.ends_at,
            device=device,
            listen_fd=listener.fileno(),
            port=listener.getsockname()[1],
            num_cores=num_cores(),
            base=environ,
            is_deterministic=config.run.deterministic,
            is_interactive=echo.is_terminal,
        )
        hang_watch = HangWatch(watch_of(run_dir, config.cluster, config.cluster.nproc_per_node, attempt))
        with closing(hang_watch):
            return supervise(commands, limits, _say_below, echo, hang_watch)


def listening_socket() -> socket.socket:
    """On loopback, on a port the system chose; it listens until rank 0 has taken it over, so nobody else gets it."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    listener.listen(socket.SOMAXCONN)
    return listener


def _device(config: Config) -> tuple[str, str | None]:
    cluster = config.cluster
    try:
        return choose_device(cluster.device, cluster.nproc_per_node, num_gpus(), torch_cuda_version())
    except ValueError as error:
        problem = Problem(
            key="cluster.device",
            what=f"no GPU for every rank: {error}",
            got="cuda",
            remedy="cluster.device=cpu, or fewer ranks (cluster.nproc_per_node)",
        )
        raise ConfigErrors([problem]) from None


def _tell_the_end(outcome: Outcome, config: Config, run_dir: Path) -> None:
    """After a good end the last lines are rank 0's summary; every other end is told here."""
    if outcome.failure is not None:
        log = short(run_folder.rank_log(run_dir, outcome.failure.rank))
        _say_below(failures.describe(outcome.failure, config.cluster.nproc_per_node, log))
    elif outcome.stopped_by is not None:
        _say_below(f"stopped by {outcome.stopped_by}; every rank has ended\nrun folder: {short(run_dir)}")


def _say_below(text: str) -> None:
    """On a terminal, below the line in which rank 0's progress bar may stand."""
    say(f"\n{text}" if sys.stdout.isatty() else text)
