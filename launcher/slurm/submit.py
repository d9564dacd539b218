"""Submitting: run folder, copy of the code, script, sbatch. Nothing is left behind where sbatch refuses."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.announce import say
from launcher.errors import ConfigErrors, Problem
from launcher.schema import Config
from launcher.slurm import client, records, snapshot
from launcher.slurm.client import SlurmError, UnknownSubmissionError
from launcher.slurm.lead import measured_save_s
from launcher.slurm.script import Array, Place, sbatch_options, script_text
from recipes.secrets import is_secret


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to be submitted: its folder is made and holds its config (``provenance.write``).

    code_dir: a copy of the code that several runs share; None: one of its own in the run folder.
    """

    config: Config
    run_dir: Path
    name: str
    code_dir: Path | None = None


def submit(
    jobs: Sequence[Prepared],
    folder: Path | None = None,
    max_parallel: int = 1,
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """Submit the runs and return their ids in order: ``12``, or ``12_3`` for an element of an array.

    One run is a job by itself. Several become arrays under ``folder``: runs that ask SLURM for the same share one, up
    to the site's largest size; ``max_parallel`` elements of each array run at once.

    Raises:
        ConfigErrors: sbatch is not here or refuses; what was submitted before that is cancelled again.
        MaybeSubmitted: nobody knows whether it took the last one; a job of an earlier submission runs nothing, so
            that it is safe to submit the runs again.
    """
    if len(jobs) == 1:
        return [_submit_one(jobs[0], environ)]
    assert folder is not None, "arrays need a folder"
    ids: dict[int, str] = {}
    try:
        for number, members in enumerate(_arrays(jobs, client.max_array_size())):
            part = [jobs[index] for index in members]
            array_id = _submit_array(part, folder, number, max_parallel, environ)
            for element, index in enumerate(members):
                ids[index] = f"{array_id}_{element}"
                records.add(jobs[index].run_dir, "submitted", job=ids[index])
    except (ConfigErrors, OSError):
        _take_back(set(ids.values()))
        raise
    return [ids[index] for index in range(len(jobs))]


def place_of(job: Prepared) -> Place:
    code_dir = job.code_dir or job.run_dir / "code"
    plugins = tuple(job.run_dir / "plugins" / Path(plugin).name for plugin in job.config.plugins)
    return Place(job.run_dir, code_dir, sys.executable, plugins, job.name, records.next_submission(job.run_dir))


def script_of(job: Prepared) -> str:
    """Of a run that is a job by itself."""
    return script_text(job.config, place_of(job), measured_save_s=measured_save_s(job.run_dir))


def _submit_one(job: Prepared, environ: Mapping[str, str]) -> str:
    place = place_of(job)
    if job.code_dir is None:
        snapshot.take(place.code_dir)
    script = _write(job.run_dir / records.SCRIPT, script_of(job))
    options = [name for name, _ in sbatch_options(job.config, place, None, 0)]
    job_id = _sbatch(script, [job], place.submission, options, environ)
    try:
        records.add(job.run_dir, "submitted", job=job_id)
    except OSError:  # a full disk: nobody would know of the job
        _take_back({job_id})
        raise
    return job_id


def _take_back(ids: set[str]) -> None:
    """What was submitted a moment ago is not wanted any more."""
    try:
        client.cancel(ids)
    except SlurmError as error:
        say(f"SLURM does not answer: {error}\nto end what was submitted: scancel {' '.join(sorted(ids))}")


def _arrays(jobs: Sequence[Prepared], largest: int) -> list[list[int]]:
    """Indices of runs whose scripts are the same but for the run folder."""
    nowhere = Place(Path("/run"), Path("/code"), "python")
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, job in enumerate(jobs):
        plugins = tuple(str(path.name) for path in place_of(job).plugins)
        groups.setdefault((script_text(job.config, nowhere), *plugins), []).append(index)
    return [
        members[start : start + largest] for members in groups.values() for start in range(0, len(members), largest)
    ]


def _submit_array(
    jobs: Sequence[Prepared], folder: Path, number: int, max_parallel: int, environ: Mapping[str, str]
) -> str:
    first = jobs[0]
    array = Array(folder / f"array_{number}", len(jobs), max_parallel)
    array.folder.mkdir(parents=True, exist_ok=True)
    _write(array.run_folders, "".join(f"{job.run_dir}\n" for job in jobs))
    code_dir = first.code_dir or snapshot.take(folder / "code")
    place = replace(place_of(first), code_dir=code_dir, submission=str(array.folder))
    script = _write(array.folder / "job.sh", script_text(first.config, place, array))
    options = [name for name, _ in sbatch_options(first.config, place, array, 0)]
    return _sbatch(script, jobs, place.submission, options, environ)


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _sbatch(
    script: Path, jobs: Sequence[Prepared], submission: str, options: Sequence[str], environ: Mapping[str, str]
) -> str:
    for job in jobs:
        records.begin_submission(job.run_dir, submission)
    secrets = {name: value for name, value in jobs[0].config.cluster.env.items() if is_secret(name, value)}
    try:
        return client.sbatch(script, {**client.clean_environment(environ, options), **secrets})
    except SlurmError as error:
        if not isinstance(error, UnknownSubmissionError):
            for job in jobs:
                records.add(job.run_dir, "refused")
        elif started := _started(jobs):
            return started
        raise refused(error) from None


def _started(jobs: Sequence[Prepared]) -> str | None:
    """The job, or array, that has begun with these runs since they were submitted, whatever sbatch and squeue say."""
    stories = [records.story(job.run_dir) for job in jobs]
    return next((story.job.partition("_")[0] for story in stories if story.job and not story.is_submitting), None)


class MaybeSubmitted(ConfigErrors):
    """It is not known whether SLURM has taken the jobs: whatever was made for them must stay."""

    about = "with SLURM"
    closing = "Whether anything was started is not known."


class NoAnswer(ConfigErrors):
    """A question to SLURM, or a cancellation, came to nothing."""

    about = "with SLURM"
    closing = "Nothing was started."


def not_here() -> ConfigErrors:
    return refused(SlurmError("sbatch is not installed here", "sbatch"))


def refused(error: SlurmError) -> ConfigErrors:
    """What a program of SLURM says as a problem, with a hint where its words are known."""
    words, program = str(error), error.program
    what, remedy = _ABOUT.get(program, _ASKING)
    for fragment, hint in _HINTS.items():
        if fragment in words:
            remedy = hint
    if isinstance(error, UnknownSubmissionError):
        return MaybeSubmitted([Problem(_UNKNOWN, "cluster", words, program, remedy=_LOOK_FIRST)])
    problem = Problem(what, "cluster", words, program, remedy=remedy)
    return ConfigErrors([problem]) if program == "sbatch" else NoAnswer([problem])


_ASKING = ("SLURM cannot be asked about its jobs", "try again later; squeue, typed by hand, should answer first")
_ABOUT = {
    "sbatch": ("SLURM does not take the job", "look at the options: fsdp-launch cluster=slurm action=print_script ..."),
    "scancel": ("SLURM does not cancel the job", "try again later; scancel, typed by hand, should answer first"),
}
_UNKNOWN = "it is not known whether SLURM takes the job"
_LOOK_FIRST = (
    "once squeue answers, the same command again with this folder (sweep.do=resume for a sweep): it looks for the job "
    "first, and of several jobs for one run folder only the one submitted last runs"
)
_HINTS = {
    "sbatch is not installed": "submit from a machine that has sbatch, a login node; cluster=local trains here",
    "is not installed here": "use a machine that has SLURM's programs, a login node",
    "Invalid generic resource": "cluster.device=cpu asks for no GPUs; cluster.gpus_per_node and cluster.gres say which",
    "nvalid partition": "cluster.partition=NAME; sinfo lists the partitions",
    "Requested time limit is invalid": "a shorter cluster.time_limit; sinfo shows the partition's",
    "node configuration is not available": "fewer ranks, cores, GPUs or memory for one node; sinfo -Nel shows them",
    "CPU count per node can not be satisfied": "fewer cluster.nproc_per_node or cpus_per_task; see sinfo -Nel",
    "Could not establish a configuration source": "this machine knows no cluster: submit from a login node",
    "nvalid account": "cluster.account=NAME; sacctmgr show associations lists yours",
    "nvalid qos": "cluster.qos=NAME; sacctmgr show qos lists them",
    "nvalid feature": "cluster.constraint; sinfo -o '%n %f' shows the nodes' features",
    "reservation is invalid": "cluster.reservation=NAME; scontrol show reservation lists them",
    "Unable to contact slurm controller": "the cluster does not answer: try again later",
}
