"""Numbers that follow from the config: F where it is left open, and how a global batch is cut. Integers only.

Callers have a checked config, so what cannot be divided is a programming error here, not a user's.
"""

from __future__ import annotations

import math

from recipes.schema.engine import ShardingConfig
from recipes.schema.training import HardwareConfig, TrainConfig

NEEDED_TO_PLAN = (
    "peak_flops_float32",
    "memory_bytes",
    "memory_bytes_per_s",
    "intra_host_bytes_per_s",
    "cross_host_bytes_per_s",
)
"""What a hardware profile must know for a plan; everything else has a default."""


def unknown_to_plan(hardware: HardwareConfig, world_size: int | None = None, ranks_per_host: int = 1) -> list[str]:
    """Keys of the profile that a plan needs and that are null.

    world_size, ranks_per_host: what the plan is of; links that no rank of it uses need not be known. None: all are.
    """
    unused = set()
    if world_size is not None and world_size <= ranks_per_host:
        unused.add("cross_host_bytes_per_s")
    if world_size is not None and ranks_per_host == 1:
        unused.add("intra_host_bytes_per_s")
    return [f"hardware.{name}" for name in NEEDED_TO_PLAN if getattr(hardware, name) is None and name not in unused]


def sharding_factor(sharding: ShardingConfig, world_size: int, ranks_per_host: int) -> int:
    """F: as said, or what ``default_factor`` makes of a null: W, the ranks of one host, or 1."""
    if sharding.factor is not None:
        return sharding.factor
    return {"world": world_size, "host": ranks_per_host, "one": 1}[sharding.default_factor]


def micro_batch(train: TrainConfig, world_size: int) -> int:
    """Samples of one forward on one rank; a null means the rank's whole part of the global batch."""
    if train.micro_batch is not None:
        return train.micro_batch
    return train.global_batch // world_size


def num_micro_batches(train: TrainConfig, world_size: int) -> int:
    """Forwards of one rank in one optimizer step: global_batch / (micro_batch x W)."""
    return train.global_batch // (micro_batch(train, world_size) * world_size)


def divisors(number: int) -> list[int]:
    """All of them, from 1 to ``number``; about as many tries as the square root of it."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def shard_groups(world_size: int, factor: int) -> list[list[int]]:
    """Rows of the rank table: each holds one copy of the parameters together. ``[[0, 1], [2, 3]]`` for W=4, F=2."""
    return [list(range(first, first + factor)) for first in range(0, world_size, factor)]


def replicate_groups(world_size: int, factor: int) -> list[list[int]]:
    """Columns of the rank table: each holds the same shard. ``[[0, 2], [1, 3]]`` for W=4, F=2."""
    return [list(range(first, world_size, factor)) for first in range(factor)]
