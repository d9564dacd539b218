"""``action=sweep`` on the folder of one submitted run: what has become of its job, and cancelling it."""

from __future__ import annotations

import sys
from pathlib import Path

from launcher.announce import say, short
from launcher.errors import EXIT_OK, ConfigErrors, Problem
from launcher.slurm import client, records
from launcher.slurm.client import SlurmError
from launcher.slurm.status import look_for_submission, states_of
from launcher.slurm.submit import refused
from recipes.data.files import expanded


def submitted(folder: str | None) -> Path | None:
    """The run folder that ``folder`` names, if a run was submitted from it."""
    if folder is None:
        return None
    run_dir = expanded(folder).absolute()
    if not (run_dir / records.FOLDER).is_dir():
        return None
    story = records.story(run_dir)
    return None if story.job is None and not story.is_submitting else run_dir


def run_command(run_dir: Path, do: str | None) -> int:
    """do: ``status`` or ``cancel``.

    Raises:
        ConfigErrors: SLURM does not answer, the command is one for sweeps, or the job to cancel is another folder's.
    """
    if do not in ("status", "cancel"):
        remedy = f"the command it was submitted with, and run.dir={run_dir}, submits it again"
        problem = Problem("this is the folder of one run, not of a sweep", "sweep.do", do, "", "status, cancel", remedy)
        raise ConfigErrors([problem])
    try:
        look_for_submission(run_dir)
    except SlurmError as error:
        raise refused(error) from None
    story = records.story(run_dir)
    if story.is_submitting:
        say(
            f"sbatch did not say whether it took the run, and no job of it is in the queue; the same command with "
            f"run.dir={short(run_dir)} submits it again, and only the job submitted last runs",
            sys.stdout,
        )
        return EXIT_OK
    assert story.job is not None
    if do == "cancel" and story.original is not None:
        what = f"this folder is a copy, and job {story.job} is its original's"
        remedy = f"sweep.dir={story.original} cancels it"
        raise ConfigErrors([Problem(what, "sweep.dir", str(run_dir), "", "the folder that was submitted", remedy)])
    try:
        if do == "cancel":
            client.cancel([story.job])
        (state,) = states_of([run_dir])
    except SlurmError as error:
        raise refused(error) from None
    say(f"job {story.job}: {state.state}{f': {state.note}' if state.note else ''}", sys.stdout)
    failure = None if state.ended is None else state.ended.failure
    if state.is_over and failure is not None and failure.shown_traceback:
        say(failure.shown_traceback, sys.stdout)
    return EXIT_OK
