"""Hundreds of AdamW steps: sharded and unsharded training tell the same losses and end in the same parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
from tests.fsdp_core.long_parity.models import MODELS_BY_NAME, batch_of, rows_of, unit_classes, without_true_zeros
from tests.support.ranks import Pools, Rank

WORLD_SIZE = 4
# Peak learning rate, steps. At 1e-3 two plain runs of t5_tiny, on whole batches and on quarters of them, told losses
# 1.3e-5 apart within 200 steps; at 5e-4 they stayed within 2e-7.
LR = {"gpt_tiny": 1e-3, "t5_tiny": 5e-4}
WARM_UP = 10
# Adam divides by the size of the gradient. With the usual 1e-8 an element whose gradients are near rounding errors
# moves by the learning rate in a direction that the order of a sum decides: two plain runs of t5_tiny, on whole batches
# and on quarters of them, were 1e-5 apart after 30 steps, and either 1e-4 from fp64. With 1e-6 they were 1e-7 apart.
EPS = 1e-6
LOSS_TOLERANCE = 1e-5  # relative, of every step
PARAMETER_TOLERANCE = 1e-4  # of the distance that all parameters together went


def _optimizer(name: str, parameters: Any) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    optimizer = torch.optim.AdamW(parameters, lr=LR[name], eps=EPS, weight_decay=0.1, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))


def _train(name: str, model: nn.Module, parameters: Any, rank: int, num_ranks: int, num_steps: int) -> list[float]:
    tiny = MODELS_BY_NAME[name]
    optimizer, scheduler = _optimizer(name, parameters)
    losses = []
    for step in range(num_steps):
        batch = rows_of(batch_of(tiny.kind, step, WORLD_SIZE), rank, num_ranks)
        loss = tiny.loss(model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _sharded(rank: Rank, name: str, num_steps: int, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    tiny = MODELS_BY_NAME[name]
    model = fsdp_core.fully_shard(tiny.build(), units=unit_classes(tiny), **options)
    losses = _train(name, model, fsdp_core.flat_parameters(model), rank.rank, rank.world_size, num_steps)
    return losses, fsdp_core.state_dict(model, rank0_only=True)


def _compare(ranks: Pools, name: str, num_steps: int, all_options: list[dict[str, Any]]) -> None:
    plain = MODELS_BY_NAME[name].build()
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    expected = _train(name, plain, plain.parameters(), 0, 1, num_steps)
    assert expected[-1] < 0.95 * expected[0], "nothing was learnt: the comparison would be empty"
    after = plain.state_dict()
    for options in all_options:
        results = ranks(WORLD_SIZE).run(_sharded, name, num_steps, options, timeout_s=1200.0)
        found = [sum(losses) / WORLD_SIZE for losses in zip(*(losses for losses, _ in results), strict=True)]
        worst = max(abs(ours - theirs) / theirs for ours, theirs in zip(found, expected, strict=True))
        assert worst <= LOSS_TOLERANCE, f"{options}: the loss is off by {worst:.1e}"
        state = results[0][1]
        assert list(state) == list(after)
        off = went = 0.0
        for key, value in after.items():
            ours, theirs, start = (without_true_zeros(key, one) for one in (state[key], value, before[key]))
            off += (ours - theirs).double().square().sum().item()
            went += (theirs - start).double().square().sum().item()
        assert off**0.5 <= PARAMETER_TOLERANCE * went**0.5, f"{options}: {(off / went) ** 0.5:.1e}"


@pytest.mark.parametrize("name", MODELS_BY_NAME)
def test_thirty_steps(ranks: Pools, name: str) -> None:
    _compare(ranks, name, 30, [{"sharding_factor": factor} for factor in (1, 2, 4)])


@pytest.mark.full
@pytest.mark.parametrize("raf", [True, False], ids=["raf", "nraf"])
@pytest.mark.parametrize("wire", ["auto", "collectives"])
@pytest.mark.parametrize("name", MODELS_BY_NAME)
def test_two_hundred_steps(ranks: Pools, name: str, wire: str, raf: bool) -> None:
    shared = {"wire": wire, "reshard_after_forward": raf}
    _compare(ranks, name, 200, [{"sharding_factor": factor, **shared} for factor in (1, 2, 4)])
