"""``cluster=slurm`` from the command line: one run becomes one job. Trains nothing where it is typed."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from launcher import provenance, resuming, run_folder
from launcher.announce import say, short
from launcher.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigErrors, Problem
from launcher.request import LaunchRequest
from launcher.schema import Config
from launcher.slurm import client, records, states
from launcher.slurm.client import SlurmError
from launcher.slurm.script import JOB_LOG
from launcher.slurm.status import exit_code_of, look_for_submission, states_of, wait_for
from launcher.slurm.submit import Prepared, not_here, refused, script_of, submit
from recipes.data.files import expanded

NEW_RUN_FOLDER = Path("runs") / "NEW_RUN_FOLDER"  # stands in a printed script for the folder that submitting makes


def submit_run(config: Config, request: LaunchRequest, environ: Mapping[str, str] = os.environ) -> int:
    """Submit the run and return at once; with ``sweep.wait=true`` when its job has ended, with the job's exit code.

    Raises:
        ConfigErrors: the run folder cannot be used, a job uses it already, or SLURM does not take the job. A folder
            made for it is gone again.
    """
    if not client.is_here():
        raise not_here()
    named = None if config.run.dir is None else expanded(config.run.dir).absolute()
    is_new = named is None or not named.exists()
    if named is not None and not is_new:
        _refuse_busy(named)
    lines = resuming.lines(config)
    run_dir = run_folder.decide(config, request)
    try:
        with run_folder.Lock(run_dir), run_folder.usable(run_dir):
            provenance.write(run_dir, request, config.plugins)
            lines += resuming.take_back(config, run_dir)
            (job,) = submit([prepared(config, request, run_dir)], environ=environ)
    except BaseException:
        if records.story(run_dir).is_submitting:  # a job may come to run there
            say(f"run folder: {short(run_dir)}")
        elif is_new:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise
    for line in lines:
        say(line)
    say(f"job {job} submitted\nrun folder: {short(run_dir)}\nlog: {short(run_dir / JOB_LOG)}", sys.stdout)
    return _wait(run_dir, job) if config.sweep.wait else EXIT_OK


def printed_script(config: Config, request: LaunchRequest) -> str:
    """``action=print_script``: what would be handed to sbatch. Makes nothing."""
    run_dir = NEW_RUN_FOLDER if config.run.dir is None else expanded(config.run.dir)
    return script_of(prepared(config, request, run_dir.absolute()))


def prepared(config: Config, request: LaunchRequest, run_dir: Path) -> Prepared:
    return Prepared(config, run_dir, config.run.name or request.choices.get("model") or config.model.kind)


def _refuse_busy(run_dir: Path) -> None:
    try:
        look_for_submission(run_dir)
        (state,) = states_of([run_dir])
    except SlurmError as error:
        raise refused(error) from None
    if state.state in (states.PENDING, states.RUNNING):
        job = records.story(run_dir).job
        problem = Problem(
            f"job {job} uses this folder ({state.state})",
            "run.dir",
            str(run_dir),
            expected="a folder that no job is waiting or running for",
            remedy=f"scancel {job}, or another run.dir",
        )
        raise ConfigErrors([problem])


def _wait(run_dir: Path, job: str) -> int:
    """Ctrl-C ends the job, as it ends a run on this machine; a closed terminal does not."""
    try:
        state = wait_for(run_dir, lambda words: say(f"job {job}: {words}"), time.sleep)
    except KeyboardInterrupt:
        say(f"cancelling job {job}")
        try:
            client.cancel([job])
        except SlurmError as error:
            say(f"SLURM does not answer, the job goes on: {error}\nto end it: scancel {job}")
        return EXIT_INTERRUPTED
    if state.ended is not None and state.ended.failure is not None and state.ended.failure.shown_traceback:
        say(state.ended.failure.shown_traceback)
    return exit_code_of(state)
