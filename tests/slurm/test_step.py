"""Which rank a process is, from the variables of a job step, an salloc shell, a batch script, torchrun in a job."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from launcher.checked import check
from launcher.compose import compose
from launcher.environment import joined_ranks
from launcher.errors import ConfigErrors
from launcher.slurm.client import clean_environment
from launcher.slurm.step import step_of

# As SLURM 22.05 sets them, for the last of 2 x 2 tasks.
BATCH = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
STEP = {
    **BATCH,
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
SALLOC = {name: BATCH[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE")}


def test_a_task_of_a_step_is_a_rank() -> None:
    ranks = joined_ranks(STEP)
    assert ranks is not None
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size) == (3, 4, 1, 2)
    assert (ranks.node_rank, ranks.num_nodes) == (1, 2)
    assert ranks.step is not None
    assert ranks.step.master_host == "node1"


@pytest.mark.parametrize(
    "environ",
    [
        BATCH,
        SALLOC,
        {**SALLOC, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
        {**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node1",
         "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "1"},
        {},
    ],
    ids=["batch script", "salloc", "salloc's interactive step", "srun --pty bash", "no job"],
)  # fmt: skip
def test_what_is_no_rank(environ: Mapping[str, str]) -> None:
    assert joined_ranks(environ) is None


def test_torchrun_inside_a_step_wins() -> None:
    ranks = joined_ranks({**STEP, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert ranks is not None
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.step) == (5, 8, 1, None)


def test_a_step_on_some_nodes_of_the_job_meets_on_its_own_first_node() -> None:
    step = step_of({**STEP, "SLURM_JOB_NODELIST": "node[1-4]", "SLURM_STEP_NODELIST": "node[3-4]"})
    assert step is not None
    assert step.master_host == "node3"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1"}, "different numbers of tasks"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "do not fit together"),
        ({"SLURM_PROCID": "1"}, "not counted node by node"),
        ({"SLURM_STEP_NODELIST": "node[1-"}, "brackets"),
        ({"SLURM_LOCALID": "one"}, "one"),
        ({"SLURM_NODEID": None}, "SLURM_NODEID is not set"),
    ],
)
def test_tasks_that_are_no_ranks(changed: dict[str, str | None], says: str) -> None:
    environ = {name: value for name, value in {**STEP, **changed}.items() if value is not None}
    with pytest.raises(ConfigErrors, match=says):
        step_of(environ)


def test_ports_are_the_same_for_all_tasks_and_others_for_every_start() -> None:
    starts = [
        STEP,
        {**STEP, "SLURM_JOB_ID": "2"},
        {**STEP, "SLURM_RESTART_COUNT": "1"},
        {**STEP, "SLURM_STEP_ID": "1"},
        {**STEP, "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "7"},
    ]
    steps = [step_of(environ) for environ in starts]
    first = step_of({**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert first is not None
    assert first.ports == steps[0].ports  # type: ignore[union-attr]
    assert len({tuple(step.ports) for step in steps if step is not None}) == len(starts)
    assert len({step.token for step in steps if step is not None}) == len(starts) - 1  # the array's element is job 1
    for step in steps:
        assert step is not None
        assert len(set(step.ports)) == 8
        assert all(1024 < port < 32768 for port in step.ports)


def test_a_job_that_submits_a_job_strips_its_own_variables() -> None:
    environ = {
        **STEP,
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_PARTITION": "old",
        "SBATCH_ACCOUNT": "mine",
        "RANK": "3",
        "MASTER_ADDR": "node1",
        "PMIX_RANK": "3",
        "CUDA_VISIBLE_DEVICES": "1",
        "WANDB_MODE": "offline",
    }
    assert clean_environment(environ, ["partition", "nodes"]) == {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_ACCOUNT": "mine",
        "WANDB_MODE": "offline",
    }


def test_from_a_step_no_job_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    _, problems = check(compose(["cluster=slurm", "cluster.device=cpu", "train.global_batch=32"]))
    assert [problem.key for problem in problems] == ["cluster"]
    assert "these are 4 ranks of a job step already" in problems[0].what
    config, problems = check(compose(["train.global_batch=32"]))
    assert problems == []
    assert (config.cluster.kind, config.cluster.num_nodes, config.cluster.nproc_per_node) == ("torchrun", 2, 2)
