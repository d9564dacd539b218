"""Runs on a real SLURM of two nodes: where ranks are, how jobs end, what brings them back."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.launchers import Local, Slurm
from tests.slurm.testbed import Testbed
from tests.support.processes import wait_until

TWO_NODES = ("cluster.num_nodes=2", "sharding=hybrid")


@pytest.fixture
def here(slurm: Testbed, tmp_path: Path) -> Iterator[Slurm]:
    launcher = Slurm(tmp_path, slurm)
    yield launcher
    launcher.close()


def test_two_nodes_train_as_four_ranks_here_do(here: Slurm) -> None:
    ended = here.run("two_nodes", *TWO_NODES)
    assert ended.code == 0, ended.text
    local = Local(here.folder)
    alone = local.run("alone", "cluster.nproc_per_node=4", "sharding=hybrid", "sharding.factor=2")
    local.close()
    assert alone.code == 0, alone.text
    assert ended.rows() == pytest.approx(alone.rows(), rel=1e-6)
    assert "4 ranks started on 2 hosts" in ended.text
    groups = next(line for line in ended.text.splitlines() if line.startswith("sharding groups"))
    assert groups.startswith("sharding groups [0 1] [2 3] by shared_memory; replication groups [0 2] [1 3]")
    hosts = [(ended.run_dir / "logs" / f"rank_{rank}.log").exists() for rank in range(4)]
    assert all(hosts)
    assert (ended.run_dir / "code" / "recipes" / "loop.py").exists()
    assert json.loads((ended.run_dir / "environment.json").read_text())["hostname"] == "node1"


@pytest.mark.parametrize(
    ("how", "rank", "why"),
    [
        ("raise", 3, "rank 3: RuntimeError: this rank does not like the weather"),
        pytest.param("kill", 1, "rank 1: was killed by SIGKILL", marks=pytest.mark.full),
    ],
)
def test_the_first_failing_rank_of_another_node_is_told(here: Slurm, how: str, rank: int, why: str) -> None:
    ended = here.run("bad", *TWO_NODES, f"model.how={how}", f"model.at_rank={rank}")
    assert ended.code == 1, ended.text
    last = here.story("bad").ended
    assert last is not None
    assert (last.state, last.exit_code, last.why, last.requeued) == ("failed", 1, why, False)
    assert last.failure is not None
    assert last.failure.rank == rank
    job = here.job("bad")
    assert client_state(here, job) == "FAILED"  # so that afterok dependencies do not fire


def client_state(here: Slurm, job: str) -> str:
    return here.cluster.run("squeue", "-h", "--states=all", "-o", "%T", "-j", job).strip()


def test_a_cancelled_job_stays_cancelled(here: Slurm) -> None:
    process = here.start("cancelled", "train.steps=100000", "cluster.max_requeues=5")
    here.wait_for_step("cancelled", 2)
    job = here.job("cancelled")
    here.cluster.run("scancel", job)
    ended = here.end(process, "cancelled")
    assert ended.code != 0
    assert "cancelled" in ended.text
    wait_until(lambda: client_state(here, job) == "CANCELLED", 60)
    last = here.story("cancelled").ended
    assert last is not None
    assert (last.state, last.requeued) == ("cancelled", False)


def test_ctrl_c_of_a_waiting_command_ends_its_job(here: Slurm) -> None:
    process = here.start("stopped", "cluster.nproc_per_node=1", "train.steps=100000")
    job = here.job("stopped")
    wait_until(lambda: client_state(here, job) == "RUNNING", 60)
    process.send_signal(2)
    ended = here.end(process, "stopped")
    assert ended.code == 130, ended.text
    assert f"cancelling job {job}" in ended.text
    wait_until(lambda: client_state(here, job) == "CANCELLED", 60)


def test_tasks_of_a_step_join_and_a_shell_in_an_allocation_submits(here: Slurm) -> None:
    """``srun fsdp-launch`` trains as torchrun's ranks do; the shell of salloc is a login shell with a job."""
    launch = " ".join([sys.executable, "-m", "launcher"])
    words = [word for word in here.command("joined") if word.startswith(("data", "train", "run", "cluster.device"))]
    alone = f"{launch} cluster=slurm cluster.partition=urgent cluster.nproc_per_node=1 {' '.join(words)}".replace(
        "/joined", "/submitted"
    )
    inside = f"srun --ntasks-per-node=1 -N2 {launch} {' '.join(words)} && {alone}"
    process = here.cluster.start("salloc", "-N2", "sh", "-ec", inside, cwd=here.folder, environ=here.environ())
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    assert "2 ranks joined on 2 hosts" in out
    assert (here.folder / "joined" / "summary.json").exists()
    assert "submitted\n" in out
    wait_until(lambda: here.story("submitted").ended is not None, 100, every_s=0.2)
    last = here.story("submitted").ended
    assert last is not None
    assert last.state == "done"
    lines = (here.folder / "submitted" / "logs" / "slurm.log").read_text().splitlines()
    assert any(line.startswith("1 rank started on this machine") for line in lines)


def test_gpus_are_asked_for_and_their_absence_is_told(here: Slurm) -> None:
    """The cluster's GPUs are made up: the job gets two, torch finds none, and that is one clear line."""
    ended = here.run("gpus", "cluster.device=cuda", "cluster.nproc_per_node=2")
    assert ended.code == 1, ended.text
    assert "#SBATCH --gpus-per-node=2" in (ended.run_dir / "slurm" / "job.sh").read_text()
    assert "cluster.device=cuda wants a GPU of its own for every rank" in ended.text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cluster.partition=nowhere"], "Invalid partition"),
        (["cluster.device=cuda", "cluster.gpus_per_node=64"], "node configuration is not available"),
    ],
    ids=["partition", "GPUs"],
)
def test_what_slurm_refuses(here: Slurm, words: list[str], says: str) -> None:
    ended = here.run("refused", *words)
    assert ended.code == 2
    assert says.lower() in ended.text.lower()
    assert "Traceback" not in ended.text
    assert not ended.run_dir.exists()


def test_a_setup_line_that_fails_fails_the_job(here: Slurm) -> None:
    ended = here.run("setup", "cluster.setup=['echo here; false']")
    assert ended.code == 1, ended.text
    assert "no rank said why" in ended.text


def test_what_will_never_start_is_told(here: Slurm) -> None:
    before = here.cluster.run("sbatch", "--parsable", "--hold", "-o", "/dev/null", "--wrap", "true").strip()
    here.cluster.run("scancel", before)
    submitted = here.run("waits", f"cluster.dependency=afterok:{before}", "sweep.wait=false")
    assert submitted.code == 0, submitted.text
    assert submitted.text.startswith("job ")
    ask = (
        "import sys, pathlib; from launcher.slurm.status import states_of as s; print(*s([pathlib.Path(sys.argv[1])]))"
    )

    def told() -> str:
        return here.cluster.run(sys.executable, "-c", ask, str(submitted.run_dir))

    wait_until(lambda: "will not start by itself: DependencyNeverSatisfied" in told(), 60, every_s=0.5)
    assert "state='pending'" in told()
