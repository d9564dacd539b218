"""Behaviours of modes: no_grad, inference_mode, eval in between, optimizers built early, children that run first."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_core
from fsdp_core import MixedPrecision
from fsdp_core.errors import StateError
from tests.fsdp_core.behaviours.variants import Tower, every_variant, two_variants
from tests.support.parity import Pair, batches_for, is_idle, mean_square
from tests.support.ranks import Pools, Rank


def _pair(options: dict[str, Any]) -> Pair:
    model = Tower()
    return Pair(model, units=[model.first, model.inner], **options)


# B20 ----------------------------------------------------------------------------------------------------------------


def _late_optimizer(rank: Rank, options: dict[str, Any]) -> None:
    pair = _pair(options)
    with torch.no_grad():
        pair.sharded(torch.ones(2, 4))
    pair.optimizer = torch.optim.SGD(pair.sharded.parameters(), lr=0.5)
    for step in range(2):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)


@two_variants
def test_b20_optimizer_built_after_a_no_grad_forward(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_late_optimizer, options)


def _early_optimizer(rank: Rank, options: dict[str, Any]) -> None:
    model = Tower()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    pair = Pair(model, units=[model.inner], **options)
    pair.plain, pair.optimizer = plain, optimizer
    pair.plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(2):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)


@two_variants
def test_b20_optimizer_built_before_sharding_works(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_early_optimizer, options)


# B21 ----------------------------------------------------------------------------------------------------------------


def _inference_first(rank: Rank, options: dict[str, Any]) -> None:
    pair = _pair(options)
    x = batches_for(rank.world_size, 3, 4)[rank.rank]
    with torch.inference_mode():
        torch.testing.assert_close(pair.sharded(x), pair.plain(x))
    for step in range(2):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
        with torch.inference_mode():
            torch.testing.assert_close(pair.sharded(x), pair.plain(x))
    assert is_idle(pair.sharded)


@every_variant
def test_b21_inference_mode_first_then_training(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_inference_first, options)


def _eval_in_between(rank: Rank, options: dict[str, Any]) -> None:
    pair = _pair(options)
    for step in range(2):
        batches = batches_for(rank.world_size, 3, 4, seed=step)
        pair.plain_gradients(batches, mean_square)
        loss = mean_square(pair.sharded, batches[rank.rank])
        pair.sharded.eval()
        with torch.no_grad():
            torch.testing.assert_close(pair.sharded(batches[0]), pair.plain(batches[0]))
        with torch.inference_mode():
            pair.sharded(batches[1])
        pair.sharded.train()
        loss.backward()
        pair.finish_step()
    assert is_idle(pair.sharded)


@every_variant
def test_b21_eval_between_forward_and_backward(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_eval_in_between, options)


# B22 ----------------------------------------------------------------------------------------------------------------


def _child_first(rank: Rank, options: dict[str, Any]) -> None:
    pair = _pair(options)
    x = torch.ones(2, 6) * (rank.rank + 1)
    torch.testing.assert_close(pair.sharded.inner(x), pair.plain.inner(x))
    pair.sharded.inner(x).sum().backward()
    expected = [pair.plain.inner(torch.ones(2, 6) * (r + 1)).sum() for r in range(rank.world_size)]
    (sum(expected) / rank.world_size).backward()
    pair.check_gradients()
    pair.plain.zero_grad()
    pair.sharded.zero_grad()
    for step in range(2):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
    assert is_idle(pair.sharded)


@every_variant
def test_b22_a_child_runs_before_the_root(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_child_first, options)


def _bottom_up(rank: Rank, options: dict[str, Any]) -> None:
    """Sharded module by module; the child even trains as a root of its own first."""
    model = Tower()
    plain = copy.deepcopy(model)
    fsdp_core.fully_shard(model.inner, **options)
    model.inner(torch.ones(2, 6)).sum().backward()
    model.zero_grad()
    pair = Pair(plain)
    pair.sharded = fsdp_core.fully_shard(model, **options)
    pair.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    assert [unit.name for unit in fsdp_core.describe(model).units] == ["<root>", "inner"]
    for step in range(2):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
    assert is_idle(model)


@every_variant
def test_b22_sharded_bottom_up(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_bottom_up, options)


# B23 ----------------------------------------------------------------------------------------------------------------


def _values_used_are_the_latest(rank: Rank, options: dict[str, Any]) -> None:
    model = fsdp_core.fully_shard(Tower(), mixed_precision=MixedPrecision(torch.bfloat16), **options)
    optimizer = torch.optim.AdamW(fsdp_core.flat_parameters(model), lr=0.1, fused=True)
    x = batches_for(rank.world_size, 3, 4)[rank.rank]

    def check() -> None:
        low = Tower().bfloat16()
        low.load_state_dict({name: value.bfloat16() for name, value in fsdp_core.state_dict(model).items()})
        with torch.no_grad():
            assert torch.equal(model(x), low(x.bfloat16()))

    check()
    for _ in range(2):
        loss = model(x).float().pow(2).mean()
        check()
        loss.backward()
        check()
        optimizer.step()
        optimizer.zero_grad()
        check()
        state = {name: value + 0.5 for name, value in fsdp_core.state_dict(model).items()}
        fsdp_core.load_state_dict(model, state)
        check()
    assert is_idle(model)


@every_variant
def test_b23_stepped_and_loaded_values_are_the_ones_used(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_values_used_are_the_latest, options)


def _forward_method(rank: Rank, options: dict[str, Any]) -> str:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

        def score(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return self.layer(x).sum(1) * scale

    model = Scores()
    pair = Pair(model, **options)
    try:
        pair.sharded.score(torch.ones(2, 4))
    except fsdp_core.errors.StateError as error:
        message = str(error)
    fsdp_core.register_forward_method(pair.sharded, "score")
    pair.step(
        rank.rank,
        batches_for(rank.world_size, 3, 4),
        lambda m, b: m.score(b, scale=2.0).pow(2).mean(),
    )
    assert is_idle(pair.sharded)
    return message


def _pointwise_outside(rank: Rank) -> list[str]:
    """A parameter of the root, used by a method that is no forward of a unit."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gain = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.gain

    model = fsdp_core.fully_shard(Scaled())
    gain = model.gain
    messages = []
    for use in (lambda: torch.ones(2, 3) * gain, lambda: torch.where(torch.ones(2, 1) > 0, gain, 0.0)):
        with pytest.raises(fsdp_core.errors.StateError) as raised:
            use()
        messages.append(str(raised.value))
    doubled = gain.detach() * torch.tensor([1.0, 2.0, 3.0])  # of the parameter's own shape: its part is here
    assert doubled.sum().item() == 6.0
    return messages


def test_a_parameter_that_meets_a_batch_outside_its_unit_is_named(ranks: Pools) -> None:
    for messages in ranks(2).run(_pointwise_outside):
        assert len(messages) == 2 and all("gain" in message for message in messages)


def _unused(rank: Rank) -> None:
    """One parameter and one unit that nobody uses."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle_unit, self.idle = nn.Linear(4, 3), nn.Linear(4, 4), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = Partly()
    fsdp_core.fully_shard(model, units=[model.idle_unit])
    model(torch.ones(2, 4)).sum().backward()
    assert model.idle.grad is not None and model.idle.grad.abs().sum().item() == 0
    assert model.idle_unit.weight.grad is None


def test_unused_parameters_have_zero_gradients_and_unused_units_none(ranks: Pools) -> None:
    ranks(2).run(_unused)


@every_variant
def test_methods_beside_forward_can_be_registered(ranks: Pools, options: dict[str, Any]) -> None:
    for message in ranks(2).run(_forward_method, options):
        assert "layer.weight" in message and "register_forward_method" in message


# torch.compile ------------------------------------------------------------------------------------------------------


def _compiled_with_hooks(rank: Rank, in_place: bool) -> None:
    model = Tower()
    fsdp_core.fully_shard(model, units=[model.inner])
    compiled = model
    if in_place:
        model.compile(backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
    with pytest.raises(StateError, match="torch.compile reached the engine's hooks") as caught:
        compiled(torch.ones(2, 4))
    assert "unit.forward = torch.compile(unit.forward)" in str(caught.value)
    torch._dynamo.reset()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_whole_model_that_is_compiled_is_told_to_compile_units(ranks: Pools, in_place: bool) -> None:
    ranks(2).run(_compiled_with_hooks, in_place)
