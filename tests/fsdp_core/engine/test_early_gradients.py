"""Gradients that are collected one by one, as soon as each is complete."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_core
from fsdp_core.comm.wire import BufferRole
from fsdp_core.handle.gradient_source import GradientSources
from fsdp_core.handle.shard_gradient import ShardGradient
from fsdp_core.runtime.find import contexts_in
from fsdp_core.runtime.unit import EARLY_NUMEL
from tests.support.parity import Pair, batches_for, early_gradients, is_idle, mean_square
from tests.support.ranks import Pools, Rank

EVERY_FACTOR = pytest.mark.parametrize("factor", [1, 2])


class Block(nn.Module):
    """Uses one layer twice, and a parameter that only the first rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Linear(4, 4), nn.Linear(4, 4)
        self.sometimes = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, uses: bool = True) -> Tensor:
        x = self.once(self.twice(torch.tanh(self.twice(x))))
        return x * self.sometimes if uses else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, 4), Block(), nn.Linear(4, 2)
        self.rank, self.fails = 0, False
        self.recomputes: bool | None = None  # reentrant or not

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for uses in (True, self.rank == 0):  # the unit is called twice: one node, two calls
            if self.recomputes is None:
                x = self.block(x, uses)
            else:
                x = checkpoint(self.block, x, uses, use_reentrant=self.recomputes)
        if self.fails and x.requires_grad:
            x.register_hook(_fail)
        return self.last(x)


def _fail(grad: Tensor) -> None:
    raise ValueError("on purpose")


# when ---------------------------------------------------------------------------------------------------------------


def _order(factor: int) -> list[str]:
    """One rank: what happens in backward of a unit of two layers."""
    order: list[str] = []
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)))
    with early_gradients():
        fsdp_core.fully_shard(model, units=[model[0]])
    collect = GradientSources.collect

    def watched(sources: GradientSources, node: Any, index: int, grad: Tensor) -> bool:
        order.append(sources.handle.params[index].spec.fqn)
        return collect(sources, node, index, grad)

    def watch_between(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: order.append("between"))

    model[0][0].register_forward_hook(watch_between)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientSources, "collect", watched)
        model(torch.ones(2, 3)).sum().backward()
    return order


def test_a_gradient_is_collected_before_backward_goes_on() -> None:
    assert _order(1) == ["0.1.weight", "between", "0.0.weight"]


def _buffers(rank: Rank) -> tuple[int, int]:
    width = int(EARLY_NUMEL**0.5)
    model = nn.Sequential(nn.Linear(width, width), nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1)))
    fsdp_core.fully_shard(model, units=[model[1]], sharding_factor=2)
    mean_square(model, torch.ones(1, width)).backward()
    root, inner = contexts_in(model)[0].units
    return len(root._early_positions), len(inner._early_positions)


def test_only_large_gradients_and_never_into_memory_held_for_the_whole_pass(ranks: Pools) -> None:
    assert ranks(2).run(_buffers) == [(0, 1)] * 2


# parity -------------------------------------------------------------------------------------------------------------


def _pair(rank: Rank, factor: int, **options: Any) -> Pair:
    model = Net()
    model.rank = rank.rank
    return Pair(model, units=[Block], sharding_factor=factor, is_early=True, **options)


def _on_ranks(pair: Pair, batches: list[Tensor]) -> None:
    """The plain model plays each rank in turn."""
    step = iter(range(len(batches)))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if model is pair.plain:
            model.rank = next(step)
        return mean_square(model, batch)

    pair.plain_gradients(batches, loss)


def _train(rank: Rank, factor: int, recomputes: bool | None) -> None:
    pair = _pair(rank, factor)
    pair.sharded.recomputes = pair.plain.recomputes = recomputes
    for seed in range(3):
        batches = batches_for(rank.world_size, 4, 3, seed=seed)
        _on_ranks(pair, batches)
        with fsdp_core.no_sync(pair.sharded):
            mean_square(pair.sharded, batches[rank.rank]).backward()
        _on_ranks(pair, batches)
        mean_square(pair.sharded, batches[rank.rank]).backward()  # on top of a sum that was kept
        _on_ranks(pair, batches)
        mean_square(pair.sharded, batches[rank.rank]).backward()  # on top of a gradient that is there
        pair.finish_step()
        _on_ranks(pair, batches)
        mean_square(pair.sharded, batches[rank.rank]).backward()  # the first of its step
        pair.finish_step()
    assert is_idle(pair.sharded)


@EVERY_FACTOR
@pytest.mark.parametrize("recomputes", [None, False, True], ids=["", "recomputed", "reentrant"])
def test_parity(ranks: Pools, factor: int, recomputes: bool | None) -> None:
    ranks(2).run(_train, factor, recomputes)


def _fail_and_retry(rank: Rank, factor: int) -> int:
    pair = _pair(rank, factor)
    batches = batches_for(rank.world_size, 4, 3)
    pair.sharded.fails = True
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            mean_square(pair.sharded, batches[rank.rank]).backward()
    pair.sharded.fails = False
    _on_ranks(pair, batches)
    mean_square(pair.sharded, batches[rank.rank]).backward()
    pair.finish_step()
    assert is_idle(pair.sharded)
    return contexts_in(pair.sharded)[0].resources.pool.num_live.get(BufferRole.GRAD_FULL, 0)


@EVERY_FACTOR
def test_a_failed_backward_leaves_nothing_collected(ranks: Pools, factor: int) -> None:
    """The last layer's gradients have been collected when the hook behind it raises."""
    assert ranks(2).run(_fail_and_retry, factor) == [0, 0]


def _grad_function(rank: Rank, factor: int) -> None:
    """``torch.autograd.grad`` collects nothing; backward(inputs=...) only what it was asked for."""
    pair = _pair(rank, factor)
    batches = batches_for(rank.world_size, 4, 3)
    _on_ranks(pair, batches)
    names = [name for name, _ in pair.plain.named_parameters()]
    parameters = dict(pair.sharded.named_parameters())
    found = torch.autograd.grad(mean_square(pair.sharded, batches[rank.rank]), list(parameters.values()))
    for name, grad in zip(names, found, strict=True):
        parameters[name].grad = grad
    pair.check_gradients()
    pair.sharded.zero_grad()
    wanted = parameters["block.once.weight"]
    mean_square(pair.sharded, batches[rank.rank]).backward(inputs=[wanted])
    assert [name for name in names if parameters[name].grad is not None] == ["block.once.weight"]
    for name, parameter in pair.plain.named_parameters():
        parameter.grad = parameter.grad if name == "block.once.weight" else None
    pair.check_gradients()
    assert is_idle(pair.sharded)


@EVERY_FACTOR
def test_gradients_that_are_asked_for(ranks: Pools, factor: int) -> None:
    ranks(2).run(_grad_function, factor)


# memory -------------------------------------------------------------------------------------------------------------


def _allocations(rank: Rank, factor: int, face: str) -> int:
    """How often gradients were given new memory in four steps."""
    count = 0
    allocate = ShardGradient._allocate

    def counted(gradient: ShardGradient) -> Tensor:
        nonlocal count
        count += 1
        return allocate(gradient)

    pair = _pair(rank, factor)
    parameters = list(pair.sharded.parameters()) if face == "named" else fsdp_core.flat_parameters(pair.sharded)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardGradient, "_allocate", counted)
        for seed in range(4):
            mean_square(pair.sharded, batches_for(rank.world_size, 4, 3, seed=seed)[rank.rank]).backward()
            fsdp_core.clip_grad_norm_(pair.sharded, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return count


@EVERY_FACTOR
@pytest.mark.parametrize("face", ["named", "flat"])
def test_the_memory_of_gradients_is_used_again(ranks: Pools, factor: int, face: str) -> None:
    assert ranks(2).run(_allocations, factor, face) == [2, 2]  # the root's and the block's, once
