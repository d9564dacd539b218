"""``-m`` with jobs that train: a new sweep, or more of one that exists."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from launcher.announce import say, short
from launcher.compose import Composer
from launcher.errors import EXIT_DOES_NOT_FIT, ConfigErrors, Problem
from launcher.provenance import hide_override
from launcher.schema import Config, SweepConfig
from launcher.sweep import fitting, folder, states, table
from launcher.sweep.chosen import backend_of
from launcher.sweep.drive import Listed, command, drive, exit_code
from launcher.sweep.folder import Asked, Sweep
from launcher.sweep.plan import Planned, digest
from launcher.sweep.record import Job
from launcher.sweep.results import write_results
from launcher.sweep.settle import settle


def start_grid(composer: Composer, planned: Sequence[Planned], arguments: Sequence[str]) -> int:
    """Runs every planned job that is not on record as done; returns the exit code: that of a plan that does not fit,
    with nothing made or started, where ``sweep.refuse_oom`` is true and a job cannot fit.

    Raises:
        ConfigErrors: the folder is another sweep's, is in use, or cannot be made.
    """
    unique = _without_doubles(planned)
    given = planned[0].asked
    if not fitting.may_start(_not_done(given, unique), given.refuse_oom):
        return EXIT_DOES_NOT_FIT
    is_new = is_still_to_be_made(given)
    sweep = opened(asked_of(composer, planned[0], arguments), given, unique)
    plugins = planned[0].config.plugins
    with folder.locked(sweep), gone_again(sweep) if is_new else nullcontext():
        settle(sweep)
        known = {job.content_hash: job for job in sweep.jobs()}
        number = max((job.number for job in known.values()), default=-1) + 1
        for job in unique:
            if job.content_hash not in known:
                known[job.content_hash] = sweep.add(job, number)
                number += 1
        named = [known[job.content_hash] for job in unique]
        jobs = [job for job in named if job.state in states.MISSING]
        if len(jobs) < len(named):
            before = [job for job in named if job not in jobs]
            say(f"on record already, not run again: {table.counts(before)}", sys.stdout)
            if any(job.state in states.UNWELL for job in before):
                say(f"to run the failed ones again: {command(sweep, 'retry')}", sys.stdout)
        if not jobs:
            write_results(sweep)
            return exit_code(sweep.jobs())
        return run_jobs(sweep, jobs, plugins, waits=given.wait, max_parallel=given.max_parallel)


def is_still_to_be_made(given: SweepConfig) -> bool:
    """Raises ConfigErrors as ``folder.find`` does."""
    return given.dir is None or folder.find(folder.named(given.dir)) is None


@contextmanager
def gone_again(sweep: Sweep) -> Iterator[None]:
    """A folder that was made for a sweep of which SLURM takes no job: the same sweep.dir serves the next try."""
    try:
        yield
    except ConfigErrors:
        if all(job.state == states.PENDING for job in sweep.jobs()):
            shutil.rmtree(sweep.path, ignore_errors=True)
        raise


def run_jobs(
    sweep: Sweep, jobs: Sequence[Job], plugins: Sequence[str], *, waits: bool, max_parallel: int | None = None
) -> int:
    """Runs these to the end, or submits them; the sweep's lock is held. waits: as ``sweep.wait``."""
    say(f"sweep folder: {short(sweep.path)}\n{len(jobs)} of {len(sweep.jobs())} jobs to run", sys.stdout)
    backend = backend_of(sweep, plugins, min(max_parallel or sweep.asked.max_parallel, len(jobs)))
    return drive(sweep, backend, Listed(jobs), waits=waits)


def opened(asked: Asked, given: SweepConfig, planned: Sequence[Planned]) -> Sweep:
    """The sweep of ``sweep.dir``: made with these jobs, or found as it is.

    Raises:
        ConfigErrors: the folder holds something else, or another sweep.
    """
    path = None if given.dir is None else folder.named(given.dir)
    sweep = None if path is None else folder.find(path)
    if sweep is None:
        return folder.new(path, asked, planned)
    before = sweep.asked
    if not folder.same_sweep(before, asked) or before.sweeper != asked.sweeper:
        words = " ".join([*before.fixed, *(f"{key}=..." for key in before.swept)])
        expected = f"the same keys swept over, everything else as it was: {words or '(nothing typed)'}"
        raise folder.refusal(sweep.path, "holds another sweep", expected)
    if sorted(before.plugins.values()) != sorted(asked.plugins.values()):
        raise ConfigErrors(
            [
                Problem(
                    "the plugins have changed since this sweep was started: its jobs would not be comparable",
                    "plugins",
                    ", ".join(asked.plugins),
                    remedy="another sweep.dir",
                )
            ]
        )
    return sweep


def asked_of(composer: Composer, first: Planned, arguments: Sequence[str]) -> Asked:
    """What is written down about this command; ``first``: any of its jobs."""
    given, config = first.asked, first.config
    words = composer.words.overrides
    fixed = [
        hide_override(str(word.input_line))
        for word in words
        if not word.is_sweep_override() and not word.key_or_group.startswith(("sweep.", "plugins"))
    ]
    swept = [word.key_or_group for word in words if word.is_sweep_override()]
    is_search = given.sweeper != "grid"
    return Asked(
        command=("fsdp-launch", *map(hide_override, arguments)),
        cwd=os.getcwd(),
        swept=tuple(dict.fromkeys(swept)),
        fixed=tuple(sorted(fixed)),
        plugins=_digests(config),
        backend=config.cluster.kind,
        max_parallel=given.max_parallel,
        fail_fast=given.fail_fast,
        metric=given.metric,
        direction=given.direction,
        sweeper=given.sweeper,
        trials=given.trials if is_search else 0,
        sampler=given.sampler if is_search else "",
        sampler_seed=given.sampler_seed if is_search else 0,
    )


def _not_done(given: SweepConfig, jobs: Sequence[Planned]) -> list[Planned]:
    """Without those that ``sweep.dir`` has on record as ended in a way that this command does not run again."""
    sweep = None if given.dir is None else folder.find(folder.named(given.dir))
    known = {} if sweep is None else {job.content_hash: job.state for job in sweep.jobs()}
    return [job for job in jobs if known.get(job.content_hash, states.PENDING) in (*states.MISSING, states.RUNNING)]


def _digests(config: Config) -> dict[str, str]:
    return {str(short(Path(file))): digest(Path(file)) for file in config.plugins}


def _without_doubles(planned: Sequence[Planned]) -> list[Planned]:
    unique: dict[str, Planned] = {}
    for job in planned:
        unique.setdefault(job.content_hash, job)
    if len(unique) < len(planned):
        say(
            f"{len(planned) - len(unique)} of {len(planned)} jobs are the same as another one: each runs once",
            sys.stdout,
        )
    return list(unique.values())
