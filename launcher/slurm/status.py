"""What became of submitted runs: SLURM is asked once for all of them, their own records where it has forgotten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_OUT_OF_MEMORY, EXIT_RANK_FAILED, EXIT_SAVED
from launcher.slurm import client, records, states
from launcher.slurm.states import JobState, job_state

# SLURM forgets an ended job after a while (MinJobAge, 300 s by default).
POLL_S = 5.0


def states_of(run_dirs: Sequence[Path]) -> list[JobState]:
    """The state of each run's latest submission. A copy of a run folder has no job: it is done, or lost.

    Raises:
        SlurmError: the controller does not answer.
    """
    stories = [records.story(run_dir) for run_dir in run_dirs]
    ids = {story.job for story in stories if story.job is not None and story.original is None}
    known = client.queue(ids)
    known = {**client.accounting(ids - known.keys()), **known}
    # The job may have recorded its end and left between these two looks.
    stories = [records.story(run_dir) for run_dir in run_dirs]
    return [job_state(known.get(story.job or ""), story) for story in stories]


def look_for_submission(run_dir: Path) -> None:
    """Where nobody knows whether the latest submission of a run was taken: the queue is asked, what it has is noted.

    Raises:
        SlurmError: the controller does not answer.
    """
    if not records.story(run_dir).is_submitting:
        return
    script = run_dir / records.SCRIPT
    found = [job for job, path in client.scripts().items() if path == script]
    if found:
        records.add(run_dir, "submitted", job=found[-1])


def wait_for(run_dir: Path, say: Callable[[str], None], pause: Callable[[float], None]) -> JobState:
    """Returns when the run's job has ended for good; tells each change. ``pause``: time.sleep, or a test's clock."""
    told = ""
    while True:
        try:
            (state,) = states_of([run_dir])
        except client.SlurmError as error:
            state = JobState(states.PENDING, f"SLURM does not answer: {error}")
        words = f"{state.state}: {state.note}" if state.note else state.state
        if words != told:
            say(words)
            told = words
        if state.is_over:
            return state
        pause(POLL_S)


def exit_code_of(state: JobState) -> int:
    """What a program that waited for the job returns."""
    if state.ended is not None and state.ended.state == state.state:
        return state.ended.exit_code
    codes = {
        states.DONE: EXIT_OK,
        states.OOM: EXIT_OUT_OF_MEMORY,
        states.CANCELLED: EXIT_INTERRUPTED,
        states.PREEMPTED: EXIT_SAVED,
    }
    return codes.get(state.state, EXIT_RANK_FAILED)
