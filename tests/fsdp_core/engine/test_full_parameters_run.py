"""Inside ``full_parameters`` the model is a plain one: it runs, and its gradients may have gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_core
from tests.support.parity import is_idle, mean_square
from tests.support.ranks import Pools, Rank


def _penalty(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    grads = torch.autograd.grad(mean_square(model, batch), list(model.parameters()), create_graph=True)
    return list(torch.autograd.grad(sum(grad.pow(2).sum() for grad in grads), list(model.parameters())))


def _inside(rank: Rank, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    plain = copy.deepcopy(model)
    fsdp_core.fully_shard(model, units=[nn.Linear], **options)
    batch = torch.randn(3, 4)
    with fsdp_core.full_parameters(model):
        torch.testing.assert_close(model(batch), plain(batch))
        for ours, theirs in zip(_penalty(model, batch), _penalty(plain, batch), strict=True):
            torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(model(batch), plain(batch))
    mean_square(model, batch).backward()
    assert is_idle(model)


@pytest.mark.parametrize("options", [{}, {"wire": "collectives"}, {"sharding_factor": 1}], ids=str)
def test_the_model_runs_inside_full_parameters(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_inside, options, timeout_s=120.0)
