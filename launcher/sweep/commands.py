"""``action=sweep``: what can be done with a sweep's folder: status, collect, resume, retry, cancel."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher.announce import say, short
from launcher.errors import EXIT_OK, ConfigErrors, Problem
from launcher.schema import Config
from launcher.slurm import client
from launcher.slurm.submit import refused
from launcher.sources import Sources
from launcher.sweep import folder, record, slurm, states, table
from launcher.sweep.drive import command, exit_code
from launcher.sweep.folder import Sweep
from launcher.sweep.locks import is_held
from launcher.sweep.measures import measures_of
from launcher.sweep.plan import digest
from launcher.sweep.record import End
from launcher.sweep.results import write_results
from launcher.sweep.search import resume_search
from launcher.sweep.settle import apparent, settle
from launcher.sweep.start import run_jobs

TAKEN = ("sweep.dir", "sweep.do", "sweep.max_parallel", "sweep.fail_fast", "sweep.wait", "action", "plugins")


def run_command(config: Config, words: Sequence[str], sources: Sources) -> int:
    """``config``: checked; ``words``: overrides as typed.

    Raises:
        ConfigErrors: no sweep is there, it is in use, plugins are missing, or a word has no meaning here.
    """
    _refuse_words(words)
    assert config.sweep.dir is not None and config.sweep.do is not None  # the checker has seen to it
    sweep = folder.existing(folder.named(config.sweep.dir))
    do = config.sweep.do
    if do == "status":
        return _status(sweep)
    if do == "collect":
        return _collect(sweep)
    if do == "cancel":
        return _cancel(sweep)
    _same_plugins(sweep, config.plugins, do)
    typed = config.sweep.max_parallel if sources.is_typed("sweep.max_parallel") else None
    if do == "resume" and sweep.asked.sweeper != "grid":
        return resume_search(sweep, config.plugins, typed)
    with folder.locked(sweep):
        settle(sweep)
        wanted = states.MISSING if do == "resume" else states.UNWELL
        jobs = [job for job in sweep.jobs() if job.state in wanted]
        if not jobs:
            return _nothing_to_do(sweep, do)
        return run_jobs(sweep, jobs, config.plugins, waits=config.sweep.wait, max_parallel=typed)


def _status(sweep: Sweep) -> int:
    found = table.results_of(sweep, apparent(sweep))
    print(table.as_text(found))
    print(f"{table.counts(found.jobs)} of {len(found.jobs)} jobs")
    for path in sweep.unreadable():
        say(f"{short(path)}: its record cannot be read, the job is left out; the command of the sweep runs it again")
    return EXIT_OK


def _collect(sweep: Sweep) -> int:
    """Results again, from the records and the run folders as they are now.

    Where nobody runs the sweep, ends that were not on record are written down.
    """
    if sweep.holder() is None:
        with folder.locked(sweep):
            settle(sweep)
    found = write_results(sweep, apparent(sweep))
    print(table.as_text(found))
    names = ("results.csv", "results.md", "report.html")
    print("\n".join([table.counts(found.jobs), *(str(short(sweep.path / name)) for name in names)]))
    return EXIT_OK


def _cancel(sweep: Sweep) -> int:
    """Ends what runs; what has not begun is cancelled."""
    holder = sweep.holder()
    if holder is not None:
        if holder.host != os.uname().nodename:
            raise folder.in_use(sweep)
        say(f"ending the jobs of process {holder.pid}")
        with suppress(ProcessLookupError):  # it has ended by itself
            os.kill(holder.pid, signal.SIGTERM)  # Ctrl-C is ignored by what a shell started in the background
        deadline = time.monotonic() + slurm.LEAVING_S
        while is_held(sweep.path / folder.LOCK_FILE):
            if time.monotonic() >= deadline:
                raise folder.in_use(sweep)
            time.sleep(0.1)
    with folder.locked(sweep):
        settle(sweep)
        _cancel_submitted(sweep)
        for job in sweep.jobs():
            if job.state in states.MISSING and job.state != states.CANCELLED:
                record.add_end(job.folder, End(states.CANCELLED, None, measures=measures_of(job.run_dir)))
        found = write_results(sweep)
    print(table.as_text(found))
    print(table.counts(found.jobs))
    return EXIT_OK


def _cancel_submitted(sweep: Sweep) -> None:
    """Jobs in SLURM's queue, or running there. One that reached its end just now stays done."""
    jobs = [job for job in sweep.jobs() if job.state == states.RUNNING]
    try:
        left = slurm.cancel(jobs, slurm.LEAVING_S)
    except client.SlurmError as error:
        raise refused(error) from None
    for job in left:
        say(f"job {job.number} ({job.slurm_id}) does not end: scancel {job.slurm_id} again, look at sweep.do=status")


def _nothing_to_do(sweep: Sweep, do: str) -> int:
    jobs = sweep.jobs()
    other, wanted = ("retry", states.UNWELL) if do == "resume" else ("resume", states.MISSING)
    say(f"nothing to {do}: {table.counts(jobs)}", sys.stdout)
    if any(job.state in wanted for job in jobs):
        say(f"perhaps: {command(sweep, other)}", sys.stdout)
    write_results(sweep)
    return exit_code(jobs)


def _refuse_words(words: Sequence[str]) -> None:
    """The jobs' configs are on record: a key of theirs typed here would have no effect."""
    keys = [(word, word.partition("=")[0].lstrip("+")) for word in words]
    wrong = [
        Problem("a sweep's jobs are what they were started with", key, source=f"command line: {word}", remedy=remedy)
        for word, key in keys
        if key not in TAKEN
        for remedy in ["leave it out; other values are another sweep (-m)"]
    ]
    if wrong:
        raise ConfigErrors(wrong)


def _same_plugins(sweep: Sweep, plugins: Sequence[str], do: str) -> None:
    """Code is named by whoever types, never by a stored sweep; it must be the code the jobs were checked with."""
    now = sorted(digest(Path(file)) for file in plugins)
    if now == sorted(sweep.asked.plugins.values()):
        return
    what = "the sweep's plugins are not these files" if plugins else "the sweep uses plugins, which are named again"
    if not sweep.asked.plugins:
        what = "the sweep uses no plugins"
    raise ConfigErrors(
        [
            Problem(
                what,
                "plugins",
                f"[{','.join(plugins)}]",
                expected=f"the same content as when it was started: [{', '.join(sweep.asked.plugins)}]",
                remedy=command(sweep, do),
            )
        ]
    )
