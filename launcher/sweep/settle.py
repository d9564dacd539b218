"""Jobs that are on record as running and are not."""

from __future__ import annotations

import time

from launcher.sweep import folder, record, states
from launcher.sweep.folder import Sweep
from launcher.sweep.locks import is_held
from launcher.sweep.measures import measures_of
from launcher.sweep.record import End, Job

_DYING_S = 10.0  # what a job may take to end after the program that started it


def settle(sweep: Sweep) -> None:
    """Jobs on record as running that are not: their end is written. The sweep's lock is held, so nobody starts any.

    A job whose program was killed a moment ago may still be ending; it is given some seconds.
    """
    deadline = time.monotonic() + _DYING_S
    for job in sweep.jobs():
        if job.state != states.RUNNING or job.backend != "local":
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
    """The jobs as they are, without writing: one on record as running that nobody runs is shown as lost."""
    if is_held(sweep.path / folder.LOCK_FILE):
        return sweep.jobs()
    shown = []
    for job in sweep.jobs():
        gone = job.state == states.RUNNING and job.backend == "local" and not is_held(job.folder / record.LOCK_FILE)
        shown.append(record.ended(job, _lost(job)) if gone else job)
    return shown


def _lost(job: Job) -> End:
    return End(states.LOST, None, error="the program that ran it is gone", measures=measures_of(job.run_dir))
