"""A job step, read from the environment that srun gives each task.

The shell of ``salloc`` and the batch script have many of the same variables and are no step: there SLURM_STEP_ID is
absent, or is one of SLURM's special numbers.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import ConfigErrors, Problem
from launcher.slurm.node_list import expand_counts, expand_hosts

_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # the batch script, the interactive step of salloc, ... have numbers from here on
# Below the ports that Linux hands out by itself (32768 and up), above those of well-known services.
_FIRST_PORT, _NUM_PORTS, _PORT_STRIDE = 12_000, 20_000, 2_503
NUM_CANDIDATES = 8


@dataclass(frozen=True)
class Step:
    """This task's place in its job step, and where its ranks meet.

    local_world_size: tasks of every node (they are equally many).
    master_host: the step's first node, where rank 0 is.
    job_id: SLURM_JOB_ID; for an element of an array, the element's own.
    restart: how often SLURM has started this job again.
    public_id: what people and sbatch call the job: ``12``, or ``12_3`` for element 3 of array 12.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_host: str
    job_id: str
    step_id: str
    restart: int
    public_id: str

    @property
    def token(self) -> str:
        """The same for all tasks of this step and for no other step."""
        return f"{self.job_id}.{self.step_id}.{self.restart}"

    @property
    def ports(self) -> list[int]:
        """Ports to meet at, best first: all tasks compute the same ones, other jobs and restarts others."""
        seed = zlib.crc32(f"{self.public_id}.{self.token}".encode())
        return [_FIRST_PORT + (seed + n * _PORT_STRIDE) % _NUM_PORTS for n in range(NUM_CANDIDATES)]


def step_of(environ: Mapping[str, str] = os.environ) -> Step | None:
    """The step this process is a task of; None outside of steps.

    Raises:
        ConfigErrors: tasks spread unevenly or not in blocks, or variables that cannot be read.
    """
    if not _is_step(environ):
        return None
    try:
        rank, local_rank, node = (int(environ[f"SLURM_{name}"]) for name in ("PROCID", "LOCALID", "NODEID"))
        counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ["SLURM_TASKS_PER_NODE"])
        hosts = expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
        restart = int(environ.get("SLURM_RESTART_COUNT", "0"))
        job_id, step_id = environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"]
    except KeyError as error:
        raise _refusal(f"{error.args[0]} is not set", environ) from None
    except ValueError as error:
        raise _refusal(str(error), environ) from None
    if len(set(counts)) != 1:
        raise _refusal("the nodes have different numbers of tasks", environ)
    if len(hosts) != len(counts):
        raise _refusal("the lists of nodes and of their tasks do not fit together", environ)
    if rank != node * counts[0] + local_rank:
        raise _refusal("the tasks are not counted node by node", environ)
    return Step(rank, sum(counts), local_rank, counts[0], hosts[0], job_id, step_id, restart, public_id(environ))


def public_id(environ: Mapping[str, str] = os.environ) -> str:
    """The job of this process as people call it; "" outside of jobs."""
    array = environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{environ['SLURM_ARRAY_TASK_ID']}" if array else environ.get("SLURM_JOB_ID", "")


def _is_step(environ: Mapping[str, str]) -> bool:
    number = environ.get("SLURM_STEP_ID", "")
    return number.isdecimal() and int(number) < _FIRST_SPECIAL_STEP and "SLURM_PROCID" in environ


def _refusal(what: str, environ: Mapping[str, str]) -> ConfigErrors:
    names = ("PROCID", "LOCALID", "NODEID", "STEP_TASKS_PER_NODE", "STEP_NODELIST", "JOB_NODELIST")
    got = " ".join(f"SLURM_{name}={environ[f'SLURM_{name}']}" for name in names if f"SLURM_{name}" in environ)
    problem = Problem(
        what=f"the ranks of this job step cannot be told apart: {what}",
        got=got,
        source="environment",
        expected="the same number of tasks on every node, counted node by node",
        remedy="srun --nodes N --ntasks-per-node M --distribution=block fsdp-launch ..., in an allocation made "
        "with the same --nodes and --ntasks-per-node (with salloc --ntasks SLURM divides the tasks as it likes)",
    )
    return ConfigErrors([problem])
