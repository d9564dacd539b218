"""Behaviours of optimizers that look at whole parameters, of groups by name, and of initialisation.

More of each in tests/fsdp_core/optimizers and tests/fsdp_core/init.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core import deferred_init, flat_parameters, fully_shard, seeded_init
from fsdp_core.errors import NumericsError
from fsdp_core.optimizers import WholeParameterOptimizer, check_optimizer, no_decay, parameter_groups
from tests.fsdp_core.behaviours.variants import Tower, every_variant, message_of, two_variants
from tests.fsdp_core.optimizers.references import NormalisedGradient
from tests.support.parity import Pair, batches_for, mean_square
from tests.support.ranks import Pools, Rank

# B33 ----------------------------------------------------------------------------------------------------------------


def _norms_on_named(rank: Rank, options: dict[str, Any]) -> None:
    """Named parameters have logical shapes: a norm is the whole parameter's by itself."""
    pair = Pair(Tower(), units=[nn.Sequential], optimizer=NormalisedGradient, **options)
    for step in range(3):
        pair.step(rank.rank, batches_for(rank.world_size, 5, 4, seed=step), mean_square)


def _norms_on_flat(rank: Rank, options: dict[str, Any]) -> str:
    """Flat parameters do not: refused by name, or run in whole-parameter mode."""
    pair = Pair(Tower(), units=[nn.Sequential], optimizer=NormalisedGradient, **options)
    message = message_of(lambda: check_optimizer(NormalisedGradient), NumericsError)
    flats = flat_parameters(pair.sharded)
    pair.optimizer = WholeParameterOptimizer(flats, NormalisedGradient)
    for step in range(3):
        batches = batches_for(rank.world_size, 5, 4, seed=step)
        pair.plain_gradients(batches, mean_square)
        mean_square(pair.sharded, batches[rank.rank]).backward()
        pair.plain_optimizer.step()
        pair.optimizer.step()
        pair.check_parameters()
        pair.plain_optimizer.zero_grad()
        pair.optimizer.zero_grad()
    return message


@every_variant
def test_b33_norms_of_whole_parameters(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_norms_on_named, options)
    for message in ranks(2).run(_norms_on_flat, options):
        assert "NormalisedGradient" in message


# B34 ----------------------------------------------------------------------------------------------------------------


def _decay_of_weights_only(rank: Rank, options: dict[str, Any], face: str) -> None:
    pair = Pair(Tower(), units=[nn.Sequential], **options)
    faces = {"flat": flat_parameters, "named": lambda model: model.parameters()}
    rules = [no_decay()]
    pair.plain_optimizer = torch.optim.AdamW(
        parameter_groups(pair.plain.named_parameters(), rules, {"weight_decay": 0.5}), lr=0.1
    )
    pair.optimizer = torch.optim.AdamW(
        parameter_groups(faces[face](pair.sharded), rules, {"weight_decay": 0.5}), lr=0.1, foreach=True
    )
    for step in range(3):
        batches = batches_for(rank.world_size, 5, 4, seed=step)
        pair.plain_gradients(batches, mean_square)
        mean_square(pair.sharded, batches[rank.rank]).backward()
        pair.plain_optimizer.step()
        pair.optimizer.step()
        pair.check_parameters(rtol=1e-4, atol=1e-5)
        pair.plain_optimizer.zero_grad()
        pair.optimizer.zero_grad()


@pytest.mark.parametrize("face", ["flat", "named"])
@two_variants
def test_b34_decay_only_where_asked(ranks: Pools, options: dict[str, Any], face: str) -> None:
    ranks(2).run(_decay_of_weights_only, options, face)


# B44, B45, B46 ------------------------------------------------------------------------------------------------------


class ScaledLinear(nn.Linear):
    scale: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Reads(nn.Module):
    """b's scale is the norm of a's rows; the head is tied to the embedding; a value decides a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 5, bias=False)
        self.a, self.b = nn.Linear(5, 5), ScaledLinear(5, 5)
        self.b.scale = nn.Parameter(self.a.weight.norm(dim=1))
        if self.a.weight.max().item() > 0:
            nn.init.trunc_normal_(self.b.weight, std=0.02)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(self.embed(x)))) @ self.head.weight


def _bits(rank: Rank, options: dict[str, Any], way: str) -> dict[str, list[float]]:
    with seeded_init(21):
        model = deferred_init(Reads) if way == "deferred" else Reads()
    fully_shard(model, units=[nn.Linear], **options)
    assert model.head.weight is model.embed.weight
    mean_square(model, batches_for(1, 3, 4)[0]).backward()
    return {name: value.tolist() for name, value in fsdp_core.state_dict(model).items()}


@every_variant
def test_b44_b45_b46_one_seed_one_set_of_bits(ranks: Pools, options: dict[str, Any]) -> None:
    with seeded_init(21):
        expected = {name: value.tolist() for name, value in Reads().state_dict().items()}
    assert expected["b.scale"] == pytest.approx(torch.tensor(expected["a.weight"]).norm(dim=1).tolist())
    for way in ("deferred", "streamed"):
        for bits in ranks(2).run(_bits, options, way):
            assert bits == expected
