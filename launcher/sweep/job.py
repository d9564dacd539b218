"""The process of one local job: ``python -m launcher.sweep.job FOLDER``. Runs the stored config, records the end.

It dies with the program that started it, and its ranks die with it. It holds the job's lock while it lives, so
whoever resumes the sweep can tell a job that runs from one that is lost.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from launcher.announce import say
from launcher.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_RANK_FAILED,
    EXIT_USAGE,
    ConfigErrors,
)
from launcher.launch import launch
from launcher.parent_death import die_with_launcher
from launcher.streams import make_streams_safe
from launcher.supervisor import Outcome
from launcher.sweep import record, states
from launcher.sweep.locks import Held, Lock
from launcher.sweep.measures import measures_of
from launcher.sweep.record import End, Job
from launcher.sweep.stored import request_of, stored_config


def main(arguments: Sequence[str] | None = None) -> int:
    die_with_launcher()
    make_streams_safe()
    parser = argparse.ArgumentParser(prog="python -m launcher.sweep.job", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plugin", action="append", default=[])
    given = parser.parse_args(arguments)
    try:
        with Lock(given.folder / record.LOCK_FILE):
            return _run(given.folder, given.plugin)
    except Held:
        say(f"{given.folder}: this job is running already")
        return EXIT_USAGE


def _run(folder: Path, plugins: Sequence[str]) -> int:
    job = record.read(folder)
    assert job is not None, "only planned jobs are started"
    record.add(folder, "started", host=platform.node(), pid=os.getpid())
    end = _end_of(job, plugins)
    for signum in (signal.SIGINT, signal.SIGTERM):  # the end is known: nothing may keep it from being written
        signal.signal(signum, signal.SIG_IGN)
    record.add_end(folder, end)
    return EXIT_RANK_FAILED if end.exit_code is None else end.exit_code


def _end_of(job: Job, plugins: Sequence[str]) -> End:
    outcomes: list[Outcome] = []
    try:
        config = stored_config(job, plugins)
        code = launch(config, request_of(job, config), on_end=outcomes.append)
    except ConfigErrors as errors:
        say(str(errors))
        return End(states.FAILED, EXIT_USAGE, error=errors.problems[0].what)
    except KeyboardInterrupt:
        return End(states.CANCELLED, EXIT_INTERRUPTED)
    except Exception as error:
        say(traceback.format_exc())
        return End(states.FAILED, EXIT_RANK_FAILED, error=f"{type(error).__name__}: {error}")
    return end_of(code, outcomes[-1] if outcomes else None, job.run_dir)


def end_of(code: int, outcome: Outcome | None, run_dir: Path) -> End:
    """The record of a run that ended with ``code``."""
    measures = measures_of(run_dir)
    failure = None if outcome is None else outcome.failure
    if failure is not None:
        return End(states.state_of(code), code, failure.rank, failure.what, measures)
    if outcome is not None and outcome.is_time_limit and code != EXIT_OK:
        return End(states.TIMEOUT, code, error=f"stopped by {outcome.stopped_by}", measures=measures)
    return End(states.state_of(code), code, measures=measures)


if __name__ == "__main__":
    sys.exit(main())
