"""Steps of optimizers at unusual times: peers that still compute must not see the new weights."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_core
from tests.support.parity import mean_square
from tests.support.ranks import Pools, Rank

WIRES = ["shared_memory", "gloo_p2p", "collectives"]
LAG_S = 0.3


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])


def _be_late(rank: Rank, module: nn.Module) -> None:
    if rank.rank == 1:
        module.register_forward_pre_hook(lambda *_: time.sleep(LAG_S))


def _step_after_a_forward(rank: Rank, wire: str, is_flat: bool) -> float:
    model = _model()
    plain = copy.deepcopy(model)
    fsdp_core.fully_shard(model, units=[nn.Linear], wire=wire)
    parameters: Any = fsdp_core.flat_parameters(model) if is_flat else model.parameters()
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    batch = torch.randn(8, 64)
    mean_square(model, batch).backward()
    _be_late(rank, model[1])
    found = model(batch)  # to look at, without no_grad: no backward will follow
    optimizer.step()
    return (found - plain(batch)).abs().max().item()


@pytest.mark.parametrize("is_flat", [False, True], ids=["named", "flat"])
@pytest.mark.parametrize("wire", WIRES)
def test_a_forward_without_backward_before_the_step(ranks: Pools, wire: str, is_flat: bool) -> None:
    assert max(ranks(2).run(_step_after_a_forward, wire, is_flat, timeout_s=120.0)) < 1e-5


def _write_between_forwards(rank: Rank, wire: str) -> float:
    """Parameters changed by hand after a forward that no backward followed: the next one waits for all ranks."""
    model = _model()
    plain = copy.deepcopy(model)
    fsdp_core.fully_shard(model, units=[nn.Linear], wire=wire)
    batch = torch.randn(8, 64)
    model(batch)
    dist.barrier()  # everybody has read the old weights
    if rank.rank == 1:
        time.sleep(LAG_S)
    with torch.no_grad():
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.mul_(2.0)
    return (model(batch) - plain(batch)).abs().max().item()


@pytest.mark.parametrize("wire", WIRES)
def test_parameters_written_between_forwards(ranks: Pools, wire: str) -> None:
    assert max(ranks(2).run(_write_between_forwards, wire, timeout_s=120.0)) < 1e-4


def _step_in_a_hook(rank: Rank, wire: str) -> None:
    """The optimizer in backward: each parameter steps as soon as its gradient is there."""
    model = _model()
    plain = copy.deepcopy(model)
    fsdp_core.fully_shard(model, units=[nn.Linear], wire=wire)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    batch = torch.randn(8, 64)
    for _ in range(2):
        if rank.rank == 1:
            model[0].register_full_backward_pre_hook(lambda *_: time.sleep(LAG_S))
        mean_square(model, batch).backward()
        mean_square(plain, batch).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.5 * parameter.grad
        model.zero_grad()
        plain.zero_grad()
        for name, value in fsdp_core.state_dict(model).items():
            torch.testing.assert_close(value, plain.state_dict()[name])


@pytest.mark.parametrize("wire", WIRES)
def test_optimizers_that_step_inside_backward(ranks: Pools, wire: str) -> None:
    ranks(2).run(_step_in_a_hook, wire, timeout_s=120.0)
