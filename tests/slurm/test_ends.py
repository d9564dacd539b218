"""How a start of a job ended, from what ranks left behind and what SLURM says; whether the run goes on; the record."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.failure import Failure
from launcher.slurm import records
from launcher.slurm.after import Limits, judge, may_go_on
from launcher.slurm.client import Queued
from launcher.slurm.records import Ended, RankEnd, Story
from launcher.slurm.states import job_state

LIMITS = Limits(max_restarts=1, max_requeues=2, lead_s=80)
RUNNING = Queued("RUNNING", time_left_s=3000)
RAISED = Failure(3, "RuntimeError: rain", 1, 10.0, traceback="Traceback ...")
KILLED = Failure(1, "was killed by SIGKILL", 1, 11.0, "vanished")
LOST_PEER = Failure(0, "RuntimeError: Connection closed by peer", 1, 9.0, "lost_peer")
NO_ROOM = Failure(2, "MemoryError: no room", 6, 10.0)
USERS = Failure(0, "data.path: nothing is there", 1, 10.0, is_users=True)


def ends(*failures: Failure) -> list[RankEnd]:
    return [RankEnd(failure.rank, records.FAILED, failure) for failure in failures]


SAVED = [RankEnd(0, records.SAVED)]
DONE = [RankEnd(0, records.DONE)]
ENDS = {
    "done": (0, DONE, RUNNING, "done", 0, ""),
    "rank 3 raises": (1, ends(LOST_PEER, RAISED), RUNNING, "failed", 1, "rank 3: RuntimeError: rain"),
    "rank 1 is killed": (1, ends(LOST_PEER, KILLED), RUNNING, "failed", 1, "rank 1: was killed by SIGKILL"),
    "out of memory": (6, ends(NO_ROOM), RUNNING, "oom", 6, "rank 2: MemoryError: no room"),
    "a node is gone": (1, ends(LOST_PEER), RUNNING, "lost", 1, "a node seems to be lost; rank 0 noticed: RuntimeError"),
    "saved": (0, SAVED, RUNNING, "preempted", 75, "saved on a signal"),
    "saved near the limit": (
        0,
        SAVED,
        Queued("RUNNING", time_left_s=140),
        "timeout",
        75,
        "saved before its time limit",
    ),
    "cancelled while training": (1, ends(RAISED), Queued("CANCELLED"), "cancelled", 1, "it was cancelled"),
    "cancelled and saved": (0, SAVED, Queued("CANCELLED"), "cancelled", 75, "it was cancelled"),
    "being cancelled": (1, ends(RAISED), Queued("COMPLETING", restarts=0), "cancelled", 1, "it was cancelled"),
    "being ended at its limit": (1, ends(RAISED), Queued("COMPLETING", "TimeLimit"), "timeout", 1, "time limit"),
    "being taken away": (1, ends(RAISED), Queued("COMPLETING", restarts=1), "preempted", 1, "SLURM took it away"),
    "over its limit": (143, [], Queued("TIMEOUT"), "timeout", 1, "it ran into its time limit"),
    "SLURM's memory limit": (1, ends(KILLED), Queued("OUT_OF_MEMORY"), "oom", 1, "SLURM ended it for want of memory"),
    "setup fails": (
        127,
        [],
        RUNNING,
        "failed",
        127,
        "the job ended with code 127 and no rank said why: see the job's log",
    ),
    "no rank ran": (0, [], RUNNING, "failed", 1, "the job ended with code 0 and no rank said why: see the job's log"),
    "SLURM is silent": (1, ends(RAISED), None, "failed", 1, "rank 3: RuntimeError: rain"),
}


@pytest.mark.parametrize(("code", "left", "queued", "state", "exit_code", "why"), ENDS.values(), ids=list(ENDS))
def test_an_end(code: int, left: list[RankEnd], queued: Queued | None, state: str, exit_code: int, why: str) -> None:
    ended = judge(code, left, queued, 0, LIMITS)
    assert (ended.state, ended.exit_code) == (state, exit_code)
    assert why in ended.why
    assert ended.requeued == (queued is not None and queued.restarts == 1)


@pytest.mark.parametrize(
    ("left", "code", "story", "goes_on"),
    [
        (SAVED, 0, Story(num_saves=1), True),
        (SAVED, 0, Story(num_saves=2), False),
        (ends(RAISED), 1, Story(), True),
        (ends(RAISED), 1, Story(num_saves=2), True),
        (ends(RAISED), 1, Story(num_crashes=1), False),
        (ends(LOST_PEER), 1, Story(num_saves=1, num_lost=1), True),
        (ends(LOST_PEER), 1, Story(num_lost=2), False),
        (ends(NO_ROOM), 6, Story(), False),
        (ends(USERS), 1, Story(), False),
        (DONE, 0, Story(), False),
        ([], 127, Story(), False),
    ],
    ids=[
        "saved",
        "saved too often",
        "crashed",
        "crashed after saves",
        "crashed too often",
        "node lost",
        "node lost too often",
        "memory",
        "user",
        "done",
        "setup",
    ],
)
def test_what_goes_on(left: list[RankEnd], code: int, story: Story, goes_on: bool) -> None:
    assert may_go_on(judge(code, left, RUNNING, 0, LIMITS), story, LIMITS) == goes_on


def test_a_story_is_read_back(tmp_path: Path) -> None:
    assert records.story(tmp_path) == Story()
    records.add(tmp_path, "started", job="12", restart=0)  # a job may start before its submitter writes
    records.add(tmp_path, "submitted", job="12")
    assert records.story(tmp_path) == Story("12", 0)
    saved = Ended("preempted", 75, "saved on a signal", requeued=True)
    records.add_end(tmp_path, "12", 0, saved)
    records.add(tmp_path, "started", job="12", restart=1)
    crashed = Ended("failed", 1, "rank 3: rain", requeued=True, failure=RAISED)
    records.add_end(tmp_path, "12", 1, crashed)
    assert records.story(tmp_path) == Story("12", 1, crashed, num_saves=1, num_crashes=1)
    with (tmp_path / "slurm" / "jobs.jsonl").open("a") as file:
        file.write('{"event": "ended", "resta')  # the disk was full
    assert records.story(tmp_path).ended == crashed


def test_the_late_end_of_a_start_that_was_replaced_counts_for_nothing(tmp_path: Path) -> None:
    for restart in (0, 1):
        records.add(tmp_path, "started", job="12", restart=restart)
    done = Ended("done", 0, "")
    records.add_end(tmp_path, "12", 1, done)
    records.add_end(tmp_path, "12", 0, Ended("failed", 1, "cut off"))
    records.add_end(tmp_path, "11", 5, Ended("failed", 1, "of another job"))
    assert records.story(tmp_path) == Story("12", 1, done)


def test_another_submission_begins_another_story(tmp_path: Path) -> None:
    records.add(tmp_path, "submitted", job="12")
    records.add_end(tmp_path, "12", 0, Ended("failed", 1, "rain", requeued=False, failure=RAISED))
    records.add(tmp_path, "submitted", job="13_4")
    assert records.story(tmp_path) == Story("13_4")


def test_ranks_ends_are_read_back(tmp_path: Path) -> None:
    left = [RankEnd(0, records.DONE, host="node1"), RankEnd(3, records.FAILED, RAISED, "node2")]
    for end in left:
        records.write_rank_end(tmp_path, "12", 1, end)
    assert records.rank_ends(tmp_path, "12", 1) == left
    assert records.rank_ends(tmp_path, "12", 0) == []


OVER = Ended("failed", 1, "rank 3: rain", failure=RAISED)
AGAIN = Ended("preempted", 75, "saved on a signal", requeued=True)
STATES = {
    "waits": (Queued("PENDING", "Priority"), Story("1"), "pending", "waits: Priority"),
    "waits again": (Queued("PENDING", "BeginTime"), Story("1", 0, AGAIN), "pending", "before: saved on a signal"),
    "will never start": (Queued("PENDING", "PartitionTimeLimit"), Story("1"), "pending", "smaller cluster.time_limit"),
    "waits in vain": (Queued("PENDING", "DependencyNeverSatisfied"), Story("1"), "pending", "will not start by itself"),
    "runs": (Queued("RUNNING", "", "node[1-2]"), Story("1", 0), "running", "on node[1-2]"),
    "ends": (Queued("COMPLETING"), Story("1", 0), "running", ""),
    "done": (Queued("COMPLETED"), Story("1", 0, Ended("done", 0, "")), "done", ""),
    "failed": (Queued("FAILED"), Story("1", 0, OVER), "failed", "rank 3: rain"),
    "failed silently": (Queued("FAILED"), Story("1", 0), "failed", "SLURM says FAILED"),
    "memory": (Queued("FAILED"), Story("1", 0, Ended("oom", 6, "no room")), "oom", "no room"),
    "cancelled": (Queued("CANCELLED"), Story("1", 0), "cancelled", "cancelled"),
    "out of time": (Queued("TIMEOUT"), Story("1", 0), "timeout", "time limit"),
    "node lost": (Queued("NODE_FAIL"), Story("1", 0), "lost", "node was lost"),
    "pushed out": (Queued("PREEMPTED"), Story("1", 0), "preempted", "took its place"),
    "forgotten": (None, Story("1", 0, OVER), "failed", "rank 3: rain"),
    "forgotten, no end": (None, Story("1", 0), "lost", "recorded no end"),
    "forgotten on its way back": (None, Story("1", 0, AGAIN), "lost", "recorded no end"),
    "a word of tomorrow": (Queued("HIBERNATING"), Story("1", 0), "running", ""),
}


@pytest.mark.parametrize(("queued", "story", "state", "note"), STATES.values(), ids=list(STATES))
def test_a_state(queued: Queued | None, story: Story, state: str, note: str) -> None:
    found = job_state(queued, story)
    assert found.state == state
    assert note in found.note
