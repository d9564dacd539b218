"""Jobs that come back on a real SLURM: preempted, near their time limit, crashed, their node or its cable lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.launchers import Ended, Local, Slurm
from tests.slurm.testbed import Testbed
from tests.support.processes import wait_until

LONG_S = 300


@pytest.fixture
def here(slurm: Testbed, tmp_path: Path) -> Iterator[Slurm]:
    launcher = Slurm(tmp_path, slurm)
    yield launcher
    launcher.close()


def uninterrupted(here: Slurm, *overrides: str) -> Ended:
    local = Local(here.folder)
    ended = local.run("uninterrupted", *overrides)
    local.close()
    assert ended.code == 0, ended.text
    return ended


def ends(here: Slurm, name: str) -> list[tuple[str, bool]]:
    """(state, requeued) of each start of the run's job."""
    return [(line["state"], line["requeued"]) for line in here.lines(name) if line["event"] == "ended"]


def preempt(here: Slurm) -> None:
    here.cluster.run(
        "sbatch", "-Q", "-p", "urgent", "-N2", "--exclusive", "-t1", "-o", "/dev/null", "--wrap", "sleep 1"
    )


@pytest.mark.full  # SLURM itself waits two minutes before a requeued job starts again
def test_a_preempted_job_is_saved_requeued_and_ends_as_if_nothing_had_been(here: Slurm) -> None:
    steps = ("train.steps=24", "cluster.grace_s=20")
    process = here.start("preempted", *steps)
    here.wait_for_step("preempted", 2)
    preempt(here)
    ended = here.end(process, "preempted")
    assert ended.code == 0, ended.text
    assert ends(here, "preempted") == [("preempted", True), ("done", False)]
    assert [line["restart"] for line in here.lines("preempted") if line["event"] == "started"] == [0, 1]
    assert ended.rows() == uninterrupted(here, *steps).rows()  # bit-equal, no step twice
    assert ended.text.count("back to the queue") == 1  # one log, appended


@pytest.mark.full
def test_a_crashed_job_is_tried_again_as_often_as_allowed(here: Slurm) -> None:
    words = ("model.how=raise", "model.at_rank=1", "cluster.max_restarts=1", "checkpoint.every=1")
    ended = here.run("crashes", *words)
    assert ended.code == 1, ended.text
    assert ends(here, "crashes") == [("failed", True), ("failed", False)]
    whys = [line["why"] for line in here.lines("crashes") if line["event"] == "ended"]
    assert whys == ["rank 1: RuntimeError: this rank does not like the weather"] * 2


@pytest.mark.full
def test_a_job_near_its_time_limit_is_saved_and_requeued(here: Slurm) -> None:
    """SLURM looks at its clocks every 30 s; the limit is made short once the job runs."""
    words = ("train.steps=100000", "cluster.time_limit=00:05:00", "cluster.signal_lead_s=60", "cluster.max_requeues=1")
    process = here.start("limited", *words)
    for restart in (0, 1):
        wait_until(lambda restart=restart: here.story("limited").restart == restart, LONG_S, every_s=0.2)
        here.cluster.run("scontrol", "update", f"JobId={here.job('limited')}", "TimeLimit=1")
        wait_until(lambda restart=restart: len(ends(here, "limited")) == restart + 1, LONG_S, every_s=0.2)
    ended = here.end(process, "limited")
    assert ended.code == 75, ended.text
    assert ends(here, "limited") == [("timeout", True), ("timeout", False)]
    steps = list(ended.rows())
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.full
def test_a_job_that_cannot_save_is_ended_at_its_limit(here: Slurm) -> None:
    words = ("model.how=wait", f"model.ready_dir={here.folder}", "cluster.time_limit=00:05:00")
    process = here.start("over", *words)
    wait_until((here.folder / "ready_0").exists, LONG_S, every_s=0.2)
    here.cluster.run("scontrol", "update", f"JobId={here.job('over')}", "TimeLimit=1")
    ended = here.end(process, "over")
    assert ended.code == 1, ended.text
    assert ends(here, "over") == [("timeout", False)]
    assert "it ran into its time limit" in ended.text


@pytest.mark.full
@pytest.mark.parametrize("how", ["daemon", "power"])
def test_a_lost_node_brings_the_job_back_from_its_newest_checkpoint(here: Slurm, how: str) -> None:
    steps = "train.steps=60" if how == "power" else "train.steps=1500"  # SLURM misses a daemon after some 10 s
    words = ("cluster.num_nodes=2", "cluster.nproc_per_node=1", steps, "checkpoint.every=4")
    process = here.start("lost", *words)
    here.wait_for_step("lost", 9)
    (here.cluster.kill_node if how == "daemon" else here.cluster.kill_processes_of)("node2")
    down = ("sinfo", "-h", "-n", "node2", "-o", "%T")
    wait_until(lambda: "down" in here.cluster.run(*down), LONG_S, every_s=0.5)
    here.cluster.start_node("node2")
    ended = here.end(process, "lost", 3 * LONG_S)  # two minutes in the queue, and many steps on a busy machine
    here.cluster.wait_for_nodes()
    assert ended.code == 0, ended.text
    assert max(line["restart"] for line in here.lines("lost") if line["event"] == "started") >= 1
    assert ended.rows() == uninterrupted(here, steps).rows()


@pytest.mark.full
def test_ranks_behind_a_cut_cable_cannot_harm_the_new_attempt(here: Slurm) -> None:
    """One node trains on, cut off, with the file system still there: the worst case."""
    blocker = here.cluster.run(
        "sbatch", "--parsable", "-w", "node1", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"
    ).strip()
    words = ("train.steps=60", "checkpoint.every=4")
    process = here.start("cut", *words)
    here.wait_for_step("cut", 5)
    here.cluster.cable("node2", "down")
    here.cluster.run("scancel", blocker)
    wait_until(lambda: here.story("cut").restart == 1, LONG_S, every_s=0.1)
    ended = here.end(process, "cut")
    here.cluster.cable("node2", "up")
    here.cluster.wait_for_nodes()
    assert ended.code == 0, ended.text
    assert ended.rows() == uninterrupted(here, *words).rows()
    lines = [line for line in here.lines("cut") if line["event"] == "ended"]
    assert (lines[-1]["restart"], lines[-1]["state"]) == (1, "done")
