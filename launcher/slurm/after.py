"""The batch script's last act: how this start of the job ended, on record, and whether the job runs again.

``python -m launcher.slurm.after --run-dir DIR --code N``, N being the exit code of srun, or of the line of the script
that failed. Its own exit code is the job's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher import failure as failures
from launcher import rank_signals
from launcher.announce import say
from launcher.errors import EXIT_OK, EXIT_OUT_OF_MEMORY, EXIT_RANK_FAILED, EXIT_SAVED
from launcher.restarts import may_help
from launcher.run_folder import rank_log
from launcher.slurm import client, records, states
from launcher.slurm.client import Queued, SlurmError
from launcher.slurm.lead import SLURM_CLOCK_S
from launcher.slurm.records import Ended, RankEnd, Story
from launcher.slurm.step import public_id

_MOST_LOST = 3  # a server that refuses connections looks the same, and would do so for ever


@dataclass(frozen=True)
class Limits:
    """max_restarts: after crashes; max_requeues: after saves; lead_s: how long before its time limit it is told."""

    max_restarts: int
    max_requeues: int
    lead_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    rank_signals.ignore_all()  # a job that is being cancelled is recorded, too
    given = _parser().parse_args(arguments)
    limits = Limits(given.max_restarts, given.max_requeues, given.lead)
    # SLURM_JOB_ID of an array's last element is the whole array's: it would be asked about, and requeued, as a whole.
    own, restart = public_id(), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    ends = records.rank_ends(given.run_dir, own, restart)
    queued = _ask(own)
    ended = judge(given.code, ends, queued, restart, limits)
    is_running = queued is not None and queued.state == "RUNNING"
    is_ours_to_requeue = is_running and may_go_on(ended, records.story(given.run_dir), limits)
    if is_ours_to_requeue:
        ended = replace(ended, requeued=True)
    records.add_end(given.run_dir, own, restart, ended)
    _tell(ended, given.run_dir, int(os.environ.get("SLURM_NTASKS", "1")))
    if is_ours_to_requeue:
        try:
            client.requeue(own)
        except SlurmError as error:
            records.add_end(given.run_dir, own, restart, replace(ended, requeued=False))
            say(f"SLURM does not take the job back: {error}")
    return ended.exit_code


def judge(code: int, ends: Sequence[RankEnd], queued: Queued | None, restart: int, limits: Limits) -> Ended:
    """How this start ended.

    code: srun's. ends: what ranks left behind: every failed one, and rank 0. queued: the job as SLURM sees it now; a
        state other than RUNNING says that SLURM is ending it; None: SLURM does not answer. restart: of this start.
    """
    found = [end.failure for end in ends if end.failure is not None]
    first = failures.first(found) if found else None
    by_slurm = _ended_by_slurm(queued, restart)
    if by_slurm is not None:  # what its ranks say is a consequence
        is_taken = by_slurm.state == states.PENDING
        state = states.PREEMPTED if is_taken else by_slurm.state
        return Ended(state, EXIT_SAVED if _saved(code, ends) else EXIT_RANK_FAILED, by_slurm.note, requeued=is_taken)
    if first is not None and first.is_lost_peer:  # whoever caused it could leave no word, nor could its keeper
        return Ended(states.LOST, first.exit_code, f"a node seems to be lost; rank {first.rank} noticed: {first.what}")
    if first is not None:
        state = states.OOM if first.exit_code == EXIT_OUT_OF_MEMORY else states.FAILED
        return Ended(state, first.exit_code, f"rank {first.rank}: {first.what}", failure=first)
    if _saved(code, ends):
        left = None if queued is None else queued.time_left_s
        if left is not None and left <= limits.lead_s + SLURM_CLOCK_S:
            return Ended(states.TIMEOUT, EXIT_SAVED, "saved before its time limit")
        return Ended(states.PREEMPTED, EXIT_SAVED, "saved on a signal")
    if code == EXIT_OK and any(end.how == records.DONE for end in ends):
        return Ended(states.DONE, EXIT_OK, "")
    why = f"the job ended with code {code} and no rank said why: see the job's log"
    return Ended(states.FAILED, code or EXIT_RANK_FAILED, why)


def may_go_on(ended: Ended, story: Story, limits: Limits) -> bool:
    """Whether the run may go back to the queue, if SLURM still counts it as running."""
    if ended.exit_code == EXIT_SAVED:
        return story.num_saves < limits.max_requeues
    if ended.state == states.LOST:  # SLURM would start it again, too, but may notice later than the ranks
        return story.num_lost < min(limits.max_requeues, _MOST_LOST)
    return ended.failure is not None and may_help(ended.failure) and story.num_crashes < limits.max_restarts


def _saved(code: int, ends: Sequence[RankEnd]) -> bool:
    return code == EXIT_OK and any(end.how == records.SAVED for end in ends)


def _ended_by_slurm(queued: Queued | None, restart: int) -> states.JobState | None:
    """What SLURM is doing with the job: ending it, or (pending) starting it again. None: it lets it run."""
    if queued is None or queued.state == "RUNNING":
        return None
    if queued.restarts is not None and queued.restarts > restart:
        return states.JobState(states.PENDING, "SLURM took it away, for another job or with a lost node")
    if queued.state == "COMPLETING":  # SLURM hides behind this word what it decided
        word = "TIMEOUT" if queued.reason == "TimeLimit" else "CANCELLED"
        return states.job_state(replace(queued, state=word), Story())
    state = states.job_state(queued, Story())
    return state if state.is_over else None


def _ask(job: str) -> Queued | None:
    try:
        return client.closely(job)
    except SlurmError as error:
        say(f"SLURM does not answer: {error}")
        return None


def _tell(ended: Ended, run_dir: Path, num_ranks: int) -> None:
    if ended.failure is not None:
        text = failures.describe(ended.failure, num_ranks, rank_log(run_dir, ended.failure.rank))
        say(text)
    elif ended.exit_code != EXIT_OK:
        say(f"{ended.state}: {ended.why}")
    if ended.requeued:
        say("back to the queue: the run goes on from its newest checkpoint")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launcher.slurm.after", description="records the end of a job")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--code", type=int, required=True)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--max-requeues", type=int, default=0)
    parser.add_argument("--lead", type=float, default=0.0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
