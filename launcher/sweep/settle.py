"""Jobs that are on record as running: which of them are, and how the others ended."""

from __future__ import annotations

import time

from launcher.announce import say
from launcher.slurm.client import SlurmError
from launcher.sweep import folder, record, slurm, states
from launcher.sweep.folder import Sweep
from launcher.sweep.locks import is_held
from launcher.sweep.measures import measures_of
from launcher.sweep.record import End, Job

_DYING_S = 10.0  # what a job may take to end after the program that started it


def settle(sweep: Sweep) -> None:
    """Writes the end of jobs that are over. The sweep's lock is held, so nobody starts any.

    A local job whose program was killed a moment ago may still be ending; it is given some seconds.

    Raises:
        ConfigErrors: a job runs that nobody looks after; SLURM does not answer.
    """
    deadline = time.monotonic() + _DYING_S
    running = [job for job in sweep.jobs() if job.state == states.RUNNING]
    if on_slurm := [job for job in running if job.backend == slurm.NAME]:
        slurm.settle(sweep, on_slurm)
    for job in running:
        if job.backend == slurm.NAME:
            continue
        while is_held(job.folder / record.LOCK_FILE):
            if time.monotonic() >= deadline:
                what = f"still has a job that runs (job {job.number}) although nothing looks after it"
                raise folder.refusal(sweep.path, what, "no job of an earlier start", f"end it: see {job.log}")
            time.sleep(0.1)
        now = record.read(job.folder)
        if now is not None and now.end is None:
            record.add_end(job.folder, _lost(job))


def apparent(sweep: Sweep) -> list[Job]:
    """The jobs as they are, without writing: those on record as running are looked at, or asked about."""
    jobs = sweep.jobs()
    is_driven = is_held(sweep.path / folder.LOCK_FILE)
    on_slurm = _on_slurm([job for job in jobs if job.state == states.RUNNING and job.backend == slurm.NAME])
    shown = []
    for job in jobs:
        is_local = job.state == states.RUNNING and job.backend != slurm.NAME
        if is_local and not is_driven and not is_held(job.folder / record.LOCK_FILE):
            job = record.ended(job, _lost(job))
        elif slurm.is_unnoted(job) and not is_driven:
            job = record.noted(job, "nobody noted whether SLURM has taken it: sweep.do=resume finds out")
        shown.append(on_slurm.get(job.number, job))
    return shown


def _on_slurm(jobs: list[Job]) -> dict[int, Job]:
    try:
        found = slurm.asked(jobs)
    except SlurmError as error:
        say(f"SLURM does not answer, jobs are shown as they are on record: {error}")
        return {}
    return {
        job.number: record.ended(job, slurm.end_of(job, state)) if state.is_over else record.noted(job, state.note)
        for job, state in found
    }


def _lost(job: Job) -> End:
    return End(states.LOST, None, error="the program that ran it is gone", measures=measures_of(job.run_dir))
