"""precision.master_dtype=bfloat16: what ranks then keep, on real ones, and that such a model learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_core.runtime.find import contexts_in
from recipes.build import build_trainee
from recipes.context import RankContext
from recipes.metrics.clock import HostClock
from recipes.plan.samples import expected_info
from recipes.ranks import Ranks
from recipes.step import train_step
from tests.recipes.plan.configs_in_tests import tiny
from tests.support.ranks import Pools, Rank


def _trained(rank: Rank, init: str) -> tuple[set[torch.dtype], list[float]]:
    """Dtypes of weights, gradients and optimizer state; losses over one batch learned by heart."""
    precision = {"precision__param_dtype": "bfloat16", "precision__reduce_dtype": "bfloat16"}
    config = tiny("gpt", precision__master_dtype="bfloat16", sharding__init=init, **precision)
    world = rank.world_size
    context = RankContext(rank.rank, world, rank.rank, world, 0, 1, ("host",) * world, "cpu", Path("."))
    info = expected_info(config)
    trainee = build_trainee(config, context, Ranks.of(context), info).trainee
    ids = torch.randint(info.vocab_size or 2, (4, 33), generator=torch.Generator().manual_seed(rank.rank))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    losses, clock = [], HostClock()
    for _ in range(12):
        clock.start()
        outcome = train_step(trainee, [batch], 3e-3, clock)
        losses.append(float(outcome.loss_sum))
    state = [value for values in trainee.optimizer.state.values() for value in values.values() if value.dim() > 0]
    (model,) = contexts_in(trainee.model)
    shards = [handle.sharded for _, handle in model.each_handle()]
    gradients = [handle.gradient.memory for _, handle in model.each_handle() if handle.gradient.memory is not None]
    assert state and gradients
    return {tensor.dtype for tensor in (*shards, *gradients, *state)}, losses


@pytest.mark.parametrize("init", ["deferred", "eager"])
def test_weights_gradients_and_state_are_bfloat16_and_learn(ranks: Pools, init: str) -> None:
    for dtypes, losses in ranks(2).run(_trained, init, timeout_s=120.0):
        assert dtypes == {torch.bfloat16}
        assert losses[-1] < 0.9 * losses[0]
