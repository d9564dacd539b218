"""The same step on real ranks: what they hand to torch.distributed, and what the engine's own ledger says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_core.runtime.find import contexts_in
from recipes.build import build_trainee
from recipes.context import RankContext
from recipes.data.records import Batch
from recipes.metrics.clock import HostClock
from recipes.plan.samples import expected_info, sample_batch
from recipes.ranks import Ranks
from recipes.schema import RecipeConfig
from recipes.schema.derived import micro_batch, num_micro_batches
from recipes.step import Trainee, train_step
from tests.support.ranks import Rank

Row = tuple[str, int, int]  # primitive, bytes of the whole tensor, ranks
SINGLE = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")


@dataclass(frozen=True)
class RealStep:
    """rows: collectives in the order they were started. counted: bytes by primitive that the wires say left this
    rank. ledger: most bytes in the engine's hands at once: shards, gradients and the buffers of its pool."""

    rows: list[Row]
    counted: dict[str, int]
    ledger: int


@contextmanager
def listening(rows: list[Row]) -> Iterator[None]:
    """torch.distributed's functions write down what they are called with."""
    heard = {name: _heard(rows, getattr(dist, name)) for name in (*SINGLE, "all_reduce") if name in vars(dist)}
    with patch.multiple(dist, **heard):
        yield


def _heard(rows: list[Row], function: Callable[..., Any]) -> Callable[..., Any]:
    name = function.__name__
    primitive = next(kind for kind in ("all_gather", "reduce_scatter", "all_reduce") if name.startswith(kind))

    def call(*args: Any, **kwargs: Any) -> Any:
        if "group" in kwargs:  # the engine's; the loop's own sums run in the default group
            whole = max(tensor.nbytes for tensor in args if isinstance(tensor, Tensor))
            rows.append((primitive, whole, dist.get_world_size(kwargs["group"])))
        return function(*args, **kwargs)

    call.__name__ = name
    return call


def real_steps(rank: Rank, configs: list[RecipeConfig], ranks_per_host: int) -> list[RealStep]:
    return [_real_step(rank, config, ranks_per_host) for config in configs]


def trainee_of(rank: int, world: int, config: RecipeConfig, ranks_per_host: int) -> tuple[Trainee, list[Batch]]:
    """What the recipe builds for this rank, and the micro-batches of a step."""
    context = RankContext(
        rank,
        world,
        rank % ranks_per_host,
        ranks_per_host,
        rank // ranks_per_host,
        world // ranks_per_host,
        tuple(f"host{one // ranks_per_host}" for one in range(world)),
        "cpu",
        Path("."),
    )
    info = expected_info(config)
    trainee = build_trainee(config, context, Ranks.of(context), info).trainee
    return trainee, [sample_batch(info, micro_batch(config.train, world))] * num_micro_batches(config.train, world)


def _real_step(rank: Rank, config: RecipeConfig, ranks_per_host: int) -> RealStep:
    trainee, batches = trainee_of(rank.rank, rank.world_size, config, ranks_per_host)
    clock = HostClock()
    rows: list[Row] = []
    for _ in range(2):
        for wire in _wires(trainee):
            wire.counter.reset()
        clock.start()
        rows.clear()
        with listening(rows):
            train_step(trainee, batches, 1e-3, clock)
    counted: dict[str, int] = {}
    for wire in _wires(trainee):
        for part in (wire.counter.intra_host_bytes, wire.counter.cross_host_bytes):
            for primitive, nbytes in part.items():
                counted[primitive] = counted.get(primitive, 0) + nbytes
    return RealStep(list(rows), counted, _ledger(trainee))


def _wires(trainee: Trainee) -> list[Any]:
    groups = contexts_in(trainee.model)[0].root.groups
    return list({id(wire): wire for wire in (groups.shard, groups.replicate, groups.world)}.values())


def _ledger(trainee: Trainee) -> int:
    (context,) = contexts_in(trainee.model)
    shards = sum(handle.sharded.nbytes for _, handle in context.each_handle())
    pool = context.resources.pool
    gradients = sum(
        torch.empty(0, dtype=handle.dtypes.param).element_size() * handle.layout.shard_numel
        for _, handle in context.each_handle()
    )
    return shards + gradients + pool.peak_live_bytes
