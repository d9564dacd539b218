"""Jobs on SLURM: one array for those that ask for the same, each with the run folder it has in the sweep.

They outlive the program that submits them. What became of them is asked from SLURM, and read from what they record
in their run folders themselves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from launcher import provenance, run_folder
from launcher.announce import say
from launcher.errors import ConfigErrors
from launcher.slurm import client, records
from launcher.slurm.client import SlurmError
from launcher.slurm.snapshot import take
from launcher.slurm.start import prepared
from launcher.slurm.states import JobState
from launcher.slurm.status import POLL_S, exit_code_of, states_of
from launcher.slurm.submit import MaybeSubmitted, Prepared, not_here, refused, submit
from launcher.sweep import record, states
from launcher.sweep.backends import Backend, Event
from launcher.sweep.folder import Sweep
from launcher.sweep.measures import measures_of
from launcher.sweep.record import End, Job
from launcher.sweep.stored import request_of, stored_config

NAME = "slurm"
_ENDING_POLL_S = 1.0
LEAVING_S = 120.0  # what a cancelled job may take to save and leave


@dataclass
class SlurmBackend(Backend):
    """plugins: the user's files. max_parallel: elements of an array that run at once. base: the environment."""

    sweep: Sweep
    plugins: Sequence[str]
    max_parallel: int
    base: Mapping[str, str]
    name = NAME
    outlives = True
    _open: dict[int, Job] = field(default_factory=dict)
    _told: dict[int, str] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        return bool(self._open)

    def describe(self) -> list[str]:
        ids = sorted({(job.slurm_id or "").partition("_")[0] for job in self._open.values()})
        return [f"submitted to SLURM as {', '.join(ids)}, up to {self.max_parallel} of each at once"]

    def submit(self, jobs: Sequence[Job]) -> None:
        """The code is copied once for all of them: what is edited while they wait does not reach them."""
        if not client.is_here():
            raise not_here()
        folder = self.sweep.path / "slurm" / f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"
        folder.mkdir(parents=True)
        code = take(folder / "code")
        ready = [self._prepared(job, code) for job in jobs]
        for job in jobs:
            record.add(job.folder, "claimed", attempt=job.attempt + 1, backend=self.name)
        try:
            ids = submit(ready, folder, self.max_parallel, self.base)
        except MaybeSubmitted:  # ``settle`` finds out, before anything is submitted again
            raise
        except ConfigErrors:
            for job in jobs:
                record.add(job.folder, "released")
            raise
        for job, slurm_id in zip(jobs, ids, strict=True):
            record.add(job.folder, "submitted", slurm_id=slurm_id)
            self._open[job.number] = _reread(job)

    def poll(self, wait_s: float) -> list[Event]:
        """SLURM is asked rarely: its controller serves the whole cluster."""
        events: list[Event] = []
        for job, state in _asked(list(self._open.values())):
            words = f"{state.state}: {state.note}" if state.note else state.state
            if state.is_over:
                del self._open[job.number]
                record_end(job, state)
                events.append(Event("ended", job.number))
            elif words != self._told.get(job.number):
                self._told[job.number] = words
                events.append(Event("note", job.number, words))
        if not events and self._open:
            time.sleep(max(wait_s, POLL_S))
        return events

    def stop(self, signum: int) -> None:
        ids = {job.slurm_id for job in self._open.values() if job.slurm_id is not None}
        try:
            client.cancel(ids)
        except SlurmError as error:
            say(f"SLURM does not answer, the jobs go on: {error}\nagain: Ctrl-C, or scancel {' '.join(sorted(ids))}")

    def _prepared(self, job: Job, code: Path) -> Prepared:
        config = stored_config(job, self.plugins)
        run_dir = run_folder.open_named(job.run_dir)
        request = request_of(job, config)
        with run_folder.Lock(run_dir), run_folder.usable(run_dir):
            provenance.write(run_dir, request, config.plugins)
        ready = prepared(config, request, run_dir)
        return Prepared(ready.config, run_dir, f"{ready.name}-{job.number}", code)


def settle(sweep: Sweep, jobs: Sequence[Job]) -> None:
    """Jobs on record as running: the end of those that are over is written down.

    A submission of which nobody knows whether SLURM took it (its program was killed, sbatch or squeue was silent) is
    looked for: a job that has started is taken over, one that waits in the queue is cancelled, so that none of them
    runs beside a later start of the same job. What SLURM takes later still runs nothing (``records.SUBMISSION``).

    Raises:
        ConfigErrors: SLURM does not answer, or a cancelled job does not leave its queue.
    """
    jobs = [_taken_over(job) if job.slurm_id is None else job for job in jobs]
    try:
        if unnoted := [job for job in jobs if job.slurm_id is None]:
            _cancel_unnoted(sweep)
            for job in unnoted:
                record.add_end(job.folder, End(states.LOST, None, error="nobody noted whether it was submitted"))
        for job, state in asked(jobs):
            if state.is_over:
                record_end(job, state)
    except SlurmError as problem:
        raise refused(problem) from None


def is_unnoted(job: Job) -> bool:
    """Whether it may have been submitted without anybody's noting it. Whoever submits it now looks the same."""
    return job.state == states.RUNNING and job.backend == NAME and job.slurm_id is None


def _taken_over(job: Job) -> Job:
    """The job as the run folder knows it, which sbatch's answer, or its own start, may have reached."""
    story = records.story(job.run_dir)
    if story.job is None or story.job in job.slurm_ids or story.original is not None:
        return job
    record.add(job.folder, "submitted", slurm_id=story.job)
    return _reread(job)


def _cancel_unnoted(sweep: Sweep) -> None:
    """Jobs of this sweep in the queue that are on nobody's record; returns when they have left it."""
    noted = {slurm_id for job in sweep.jobs() for slurm_id in job.slurm_ids}
    deadline = time.monotonic() + LEAVING_S
    while ids := {job for job, script in client.scripts().items() if _is_ours(sweep, script) and job not in noted}:
        if time.monotonic() >= deadline:
            listed = " ".join(sorted(ids))
            raise SlurmError(f"jobs of the sweep that nobody noted do not end: scancel {listed}", "scancel")
        client.cancel(ids)
        time.sleep(_ENDING_POLL_S)


def cancel(jobs: Sequence[Job], wait_s: float) -> list[Job]:
    """Cancels submitted jobs and writes down how each ended; a later start must not meet one that still saves.

    In a copy of a sweep's folder the jobs are the original's, which are left alone: here they are lost.

    Returns those that had not ended after ``wait_s``. Raises SlurmError.
    """
    left = list(jobs)
    ours = [job for job in left if records.story(job.run_dir).original is None]
    client.cancel({job.slurm_id for job in ours if job.slurm_id is not None})
    deadline = time.monotonic() + wait_s
    while left:
        over = {job.number: state for job, state in asked(left) if state.is_over}
        for job in left:
            if job.number in over:
                record_end(job, over[job.number])
        left = [job for job in left if job.number not in over]
        if not left or time.monotonic() >= deadline:
            break
        time.sleep(_ENDING_POLL_S)
    return left


def asked(jobs: Sequence[Job]) -> list[tuple[Job, JobState]]:
    """Those that were submitted, and what has become of them. Raises SlurmError if SLURM does not answer."""
    submitted = [job for job in jobs if job.slurm_id is not None]
    return list(zip(submitted, states_of([job.run_dir for job in submitted]), strict=True))


def end_of(job: Job, state: JobState) -> End:
    failure = None if state.ended is None else state.ended.failure
    measures = measures_of(job.run_dir)
    if failure is not None and state.state != states.DONE:
        return End(state.state, exit_code_of(state), failure.rank, failure.what, measures)
    return End(state.state, exit_code_of(state), error=state.note, measures=measures)


def record_end(job: Job, state: JobState) -> None:
    record.add_end(job.folder, end_of(job, state))


def _asked(jobs: Sequence[Job]) -> list[tuple[Job, JobState]]:
    """While waiting, a controller that does not answer is asked again later."""
    try:
        return asked(jobs)
    except SlurmError:
        return []


def _is_ours(sweep: Sweep, script: Path) -> bool:
    return script.resolve().is_relative_to(sweep.path.resolve())


def _reread(job: Job) -> Job:
    return record.reread(job.folder)
