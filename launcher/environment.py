"""Ranks that somebody else started: read from the environment, as torchrun and its like set it, or as srun does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import ConfigErrors, Problem
from launcher.slurm.step import Step, step_of

REMEDY = "start with torchrun, or unset RANK and WORLD_SIZE for a plain start on this machine"


@dataclass(frozen=True)
class JoinedRanks:
    """This process among ranks that exist already. Every host has local_world_size of them, so W = num_nodes x that.

    step: the SLURM job step whose tasks the ranks are; None if torchrun, its like, or our own launcher started them.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    step: Step | None = None

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def node_rank(self) -> int:
        return self.rank // self.local_world_size

    @classmethod
    def of_step(cls, step: Step) -> JoinedRanks:
        return cls(step.rank, step.world_size, step.local_rank, step.local_world_size, step)


def joined_ranks(environ: Mapping[str, str] = os.environ) -> JoinedRanks | None:
    """The ranks to join, or None for a plain start.

    RANK and WORLD_SIZE come first: torchrun inside a SLURM job sets them, and SLURM's variables then speak of torchrun
    itself. LOCAL_RANK and LOCAL_WORLD_SIZE may be absent: all ranks are then taken to be on this host. Without them the
    tasks of a SLURM job step are the ranks, if there are several: one alone is a shell on a node (``srun --pty``).

    Raises:
        ConfigErrors: half of the variables, no numbers, or ranks spread unevenly over hosts.
    """
    names = ("RANK", "WORLD_SIZE")
    present = [name for name in names if environ.get(name)]
    if not present:
        step = step_of(environ)
        return None if step is None or step.world_size == 1 else JoinedRanks.of_step(step)
    if len(present) < len(names):
        absent = next(name for name in names if name not in present)
        raise ConfigErrors([_problem(f"{present[0]} is set but {absent} is not", present, environ)])
    world_size = _number("WORLD_SIZE", environ, default=None)
    rank = _number("RANK", environ, default=None)
    local_world_size = _number("LOCAL_WORLD_SIZE", environ, default=world_size)
    local_rank = _number("LOCAL_RANK", environ, default=rank % local_world_size if local_world_size else 0)
    used = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        raise ConfigErrors([_problem("the ranks of the environment do not fit together", used, environ)])
    if world_size % local_world_size:
        raise ConfigErrors([_problem("the hosts have different numbers of ranks", used, environ)])
    return JoinedRanks(rank, world_size, local_rank, local_world_size)


def _number(name: str, environ: Mapping[str, str], default: int | None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigErrors([_problem(f"{name} is no whole number", [name], environ)]) from None


def _problem(what: str, names: list[str], environ: Mapping[str, str]) -> Problem:
    got = " ".join(f"{name}={environ[name]}" for name in names if name in environ)
    return Problem(
        what=what,
        got=got,
        source="environment",
        expected="RANK in [0, WORLD_SIZE), LOCAL_RANK in [0, LOCAL_WORLD_SIZE), the same number of ranks on every host",
        remedy=REMEDY,
    )
