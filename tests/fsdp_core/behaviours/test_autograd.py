"""Behaviours of autograd: many forwards, double backward, outputs of any kind, checkpointing, frozen units."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_core
from fsdp_core import MixedPrecision
from fsdp_core.errors import StateError
from tests.fsdp_core.behaviours.variants import Tower, every_variant, message_of, two_variants
from tests.support.parity import Pair, batches_for, is_idle, mean_square, whole
from tests.support.ranks import Pools, Rank


def _tower(**options: Any) -> Pair:
    model = Tower()
    return Pair(model, units=[model.first, model.inner, model.last], **options)


# B12 ----------------------------------------------------------------------------------------------------------------


def _two_forwards(rank: Rank, options: dict[str, Any], how: str) -> None:
    pair = _tower(**options)
    for step in range(2):
        one = batches_for(rank.world_size, 3, 4, seed=step)
        two = batches_for(rank.world_size, 3, 4, seed=step + 10)
        pair.plain_gradients(one, mean_square)
        pair.plain_gradients(two, mean_square)
        first = mean_square(pair.sharded, one[rank.rank])
        second = mean_square(pair.sharded, two[rank.rank])
        if how == "one backward":
            (first + second).backward()
        elif how == "in order":
            first.backward()
            second.backward()
        elif how == "reversed":
            second.backward()
            first.backward()
        else:
            first.backward(retain_graph=True)
            second.backward()
            before = whole(next(pair.sharded.parameters()).grad)
            first.backward()  # once more over the graph that was kept
            assert not torch.equal(whole(next(pair.sharded.parameters()).grad), before)
            pair.plain_gradients(one, mean_square)
        pair.finish_step()
    assert is_idle(pair.sharded)


@pytest.mark.parametrize("how", ["one backward", "in order", "reversed", "retained"])
@every_variant
def test_b12_two_forwards(ranks: Pools, options: dict[str, Any], how: str) -> None:
    ranks(2).run(_two_forwards, options, how)


# B13 ----------------------------------------------------------------------------------------------------------------


def _penalty(model: nn.Module, batch: Tensor) -> Tensor:
    x = batch.clone().requires_grad_()
    out = model(x).pow(2).sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    return out / 10 + grad.norm(dim=1).sub(1).pow(2).mean()


def _gradient_penalty(rank: Rank, options: dict[str, Any]) -> None:
    pair = _tower(lr=0.05, **options)
    for step in range(2):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), _penalty)
    assert is_idle(pair.sharded)


@every_variant
def test_b13_gradient_penalty(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_gradient_penalty, options)


def _parameter_penalty(rank: Rank) -> str:
    model = fsdp_core.fully_shard(Tower(), wire="collectives")
    loss = mean_square(model, torch.ones(2, 4))
    return message_of(lambda: torch.autograd.grad(loss, list(model.parameters()), create_graph=True), StateError)


def test_b13_a_graph_of_parameter_gradients_is_refused_by_name(ranks: Pools) -> None:
    for message in ranks(2).run(_parameter_penalty):
        assert "create_graph" in message and "full_parameters" in message and "unit: <root>" in message


# B14, B15 -----------------------------------------------------------------------------------------------------------

Named = namedtuple("Named", "a b")


@dataclass
class Record:
    a: Tensor
    b: Tensor | None


class Opaque:
    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b


class Many(nn.Module):
    """A unit that returns its two results in any wrapping."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Any:
        a, b = torch.tanh(self.a(x)), torch.tanh(self.b(x))
        return {
            "tuple": lambda: (a, b, None, 3),
            "dict": lambda: {"a": a, "b": b},
            "nested": lambda: [{"x": (a, [b])}],
            "namedtuple": lambda: Named(a, b),
            "dataclass": lambda: Record(a, b),
            "object": lambda: Opaque(a, b),
        }[self.how]()


class UsesMany(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.many, self.last = Many(how), nn.Linear(4, 2)

    def forward(self, x: Tensor, only: str = "") -> Tensor:
        out, how = self.many(x), self.many.how
        if how in ("tuple", "namedtuple"):
            a, b = out[0], out[1]
        elif how == "dict":
            a, b = out["a"], out["b"]
        elif how == "nested":
            a, b = out[0]["x"][0], out[0]["x"][1][0]
        else:
            a, b = out.a, out.b
        return self.last({"": a * b, "a": a, "b": b}[only])


def _outputs(rank: Rank, options: dict[str, Any], how: str) -> None:
    model = UsesMany(how)
    pair = Pair(model, units=[model.many], **options)
    for step in range(2):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
    assert is_idle(pair.sharded)


@pytest.mark.parametrize("how", ["tuple", "dict", "nested", "namedtuple", "dataclass", "object"])
@two_variants
def test_b14_outputs_of_any_kind(ranks: Pools, options: dict[str, Any], how: str) -> None:
    ranks(2).run(_outputs, options, how)


def _some_outputs(rank: Rank, options: dict[str, Any]) -> None:
    model = UsesMany("dict")
    pair = Pair(model, units=[model.many], **options)
    for step, only in enumerate(["a", "b", "", "b"]):
        batches = batches_for(rank.world_size, 3, 4, seed=step)
        pair.step(rank.rank, batches, lambda m, batch, only=only: m(batch, only).pow(2).mean())
        assert is_idle(pair.sharded)


@every_variant
def test_b15_not_all_outputs_in_the_loss(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_some_outputs, options)


# B16 ----------------------------------------------------------------------------------------------------------------


def _autograd_grad(rank: Rank, options: dict[str, Any]) -> None:
    pair = _tower(**options)
    batches = batches_for(rank.world_size, 3, 4)
    expected = pair.plain_gradients(batches, mean_square)
    loss = mean_square(pair.sharded, batches[rank.rank])
    named = dict(pair.sharded.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()))
    for name, grad in zip(named, grads, strict=True):
        torch.testing.assert_close(whole(grad), expected[name])
        assert named[name].grad is None
    loss = mean_square(pair.sharded, batches[rank.rank])
    (one,) = torch.autograd.grad(loss, [named["inner.0.weight"]])
    torch.testing.assert_close(whole(one), expected["inner.0.weight"])
    loss = mean_square(pair.sharded, batches[rank.rank])
    loss.backward(inputs=[named["last.bias"], named["inner.2.weight"]])
    assert {name for name, p in named.items() if p.grad is not None} == {"last.bias", "inner.2.weight"}
    torch.testing.assert_close(whole(named["last.bias"].grad), expected["last.bias"])
    assert is_idle(pair.sharded)


@every_variant
def test_b16_autograd_grad_gives_sharded_averages(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_autograd_grad, options)


# B17 ----------------------------------------------------------------------------------------------------------------


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Tower()

    def forward(self, *, x: Tensor, scale: float = 1.0, extra: Any = None) -> Tensor:
        return self.inner(x) * scale


def _keyword_inputs(rank: Rank, options: dict[str, Any]) -> None:
    model = Keywords()
    pair = Pair(model, units=[model.inner], **options)
    batches = batches_for(rank.world_size, 3, 4)
    pair.step(rank.rank, batches, lambda m, b: m(x=b, scale=2.0).pow(2).mean())


@two_variants
def test_b17_keyword_only_inputs(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_keyword_inputs, options)


def _input_gradients(rank: Rank, options: dict[str, Any]) -> None:
    model = fsdp_core.fully_shard(Keywords(), mixed_precision=MixedPrecision(torch.bfloat16), **options)
    x = torch.randn(3, 4, requires_grad=True)
    index = torch.arange(3)
    out = model(x=x, extra={"index": index, "more": [torch.ones(2)]})
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32 and x.grad.any()


@every_variant
def test_b17_input_gradients_through_the_cast_are_fp32(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_input_gradients, options)


# B18 ----------------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """``where``: the whole unit, one region inside it, or two regions; ``times``: calls of the unit per forward."""

    def __init__(self, where: str, use_reentrant: bool, times: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = CheckpointedBlock(where if where != "outside" else "", use_reentrant)
        self.last = nn.Linear(4, 2)
        self.where, self.use_reentrant, self.times = where, use_reentrant, times

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            if self.where == "outside":
                x = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
            else:
                x = self.block(x)
        return self.last(x)


class CheckpointedBlock(nn.Module):
    def __init__(self, where: str, use_reentrant: bool) -> None:
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(4, 6), nn.Linear(6, 4), nn.Parameter(torch.ones(4))
        self.where, self.use_reentrant = where, use_reentrant

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(x)))) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "inside":
            return checkpoint(self.body, x, use_reentrant=self.use_reentrant)
        if self.where == "twice inside":
            x = checkpoint(self.up, x, use_reentrant=self.use_reentrant)
            return checkpoint(self.down, torch.tanh(x), use_reentrant=self.use_reentrant) * self.gain
        return self.body(x)


def _checkpointing(rank: Rank, options: dict[str, Any], where: str, reentrant: bool, times: int) -> list[int]:
    model = Checkpointed(where, reentrant, times)
    pair = Pair(model, units=[model.block], **options)
    log = fsdp_core.start_trace(pair.sharded)
    reductions = []
    for step in range(2):
        log.clear()
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
        reductions.append(log.rows("reduce").count(("reduce", "block")))
        assert is_idle(pair.sharded)
    return reductions


@pytest.mark.parametrize("where", ["outside", "inside", "twice inside"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@every_variant
def test_b18_checkpointing(ranks: Pools, options: dict[str, Any], reentrant: bool, where: str) -> None:
    reductions = ranks(2).run(_checkpointing, options, where, reentrant, 1)
    most = 1 if where != "twice inside" or not reentrant else 3
    assert all(1 <= count <= most for counts in reductions for count in counts), reductions


@pytest.mark.parametrize("where", ["outside", "inside", ""])
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@two_variants
def test_b18_checkpointed_unit_called_twice(ranks: Pools, options: dict[str, Any], reentrant: bool, where: str) -> None:
    reductions = ranks(2).run(_checkpointing, options, where, reentrant, 2)
    most = 2 if reentrant and where else 1  # reentrant: each call is a backward of its own
    assert all(1 <= count <= most for counts in reductions for count in counts), reductions


def _checkpoint_over_units(rank: Rank, options: dict[str, Any], reentrant: bool) -> None:
    """The whole sharded model inside a checkpoint of the user."""
    pair = _tower(**options)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return checkpoint(model, batch.requires_grad_(), use_reentrant=reentrant).pow(2).mean()

    for step in range(2):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), loss)
    assert is_idle(pair.sharded)


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@every_variant
def test_b18_the_root_inside_a_checkpoint(ranks: Pools, options: dict[str, Any], reentrant: bool) -> None:
    ranks(2).run(_checkpoint_over_units, options, reentrant)


# B19 ----------------------------------------------------------------------------------------------------------------


class WithFrozen(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(4, 4), FrozenPart(), nn.Linear(4, 2)
        self.frozen.requires_grad_(False)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = self.frozen(x, x * 2)
        return self.last(x)


class FrozenPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))


def _frozen_unit(rank: Rank, options: dict[str, Any], times: int) -> None:
    model = WithFrozen(times)
    pair = Pair(model, units=[model.first, model.frozen, model.last], **options)
    log = fsdp_core.start_trace(pair.sharded)
    for step in range(2):
        log.clear()
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
        rows = [row for row in log.rows("gather", "free", "reduce") if row[1] == "frozen"]
        assert rows.count(("gather", "frozen")) == rows.count(("free", "frozen"))
        assert ("reduce", "frozen") not in rows
        frees = options.get("reshard_after_forward", True) and options.get("sharding_factor") != 1
        if frees and times == 1 and options.get("wire") == "collectives":
            assert rows == [("gather", "frozen"), ("free", "frozen")] * 2
        assert pair.sharded.frozen.a.weight.grad is None
    assert is_idle(pair.sharded)


@pytest.mark.parametrize("times", [1, 2])
@every_variant
def test_b19_frozen_units_are_freed_as_often_as_gathered(ranks: Pools, options: dict[str, Any], times: int) -> None:
    ranks(2).run(_frozen_unit, options, times)
