"""Behaviours under failure and change: exceptions, uneven batches, other orders, the limiter, ranks that part."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core import RateLimit
from fsdp_core.comm.wire import BufferRole
from fsdp_core.errors import EngineError, MismatchError
from fsdp_core.runtime.find import contexts_in
from fsdp_core.trace.schedule_check import check_schedule, first_difference
from tests.fsdp_core.behaviours.variants import Tower, every_variant, message_of, two_variants
from tests.support.parity import Pair, batches_for, is_idle, mean_square
from tests.support.ranks import Pools, Rank

# B09 ----------------------------------------------------------------------------------------------------------------


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, side: int) -> Tensor:
        return self.last((self.left if side == 0 else self.right)(x))


def _each_its_own_unit(rank: Rank, options: dict[str, Any]) -> str:
    model = Either()
    fsdp_core.fully_shard(model, units=[model.left, model.right], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step() -> None:
        model(torch.ones(2, 4), rank.rank).sum().backward()
        optimizer.step()

    return message_of(step, MismatchError)


@pytest.mark.parametrize("raf", [True, pytest.param(False, marks=pytest.mark.full)], ids=["raf", "nraf"])
@pytest.mark.parametrize("wire", ["collectives", "gloo_p2p", "shared_memory"])
def test_b09_each_rank_uses_a_unit_of_its_own(ranks: Pools, wire: str, raf: bool) -> None:
    outcomes = ranks(2).outcomes(_each_its_own_unit, {"wire": wire, "reshard_after_forward": raf})
    ranks(2).is_usable = False  # the wires of a failed step may be in different places
    for outcome in outcomes:
        assert outcome.is_ok, outcome.traceback
        assert "left" in outcome.value and "right" in outcome.value


class Summands(nn.Module):
    """All units run on every rank; a loss may do without some. Their sizes are not alike."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(4, 9), nn.Linear(4, 3)

    def forward(self, x: Tensor, missing: str) -> Tensor:
        parts = {name: unit(x).square().mean() for name, unit in self.named_children()}
        return torch.stack([part for name, part in parts.items() if name not in missing]).sum()


def _one_loss_misses(rank: Rank, options: dict[str, Any], missing: str) -> str:
    model = Summands()
    fsdp_core.fully_shard(model, units=[model.a, model.b, model.c], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step() -> None:
        model(torch.ones(2, 4), missing if rank.rank == 1 else "").backward()
        optimizer.step()

    return message_of(step, MismatchError)


@pytest.mark.parametrize("raf", [True, pytest.param(False, marks=pytest.mark.full)], ids=["raf", "nraf"])
@pytest.mark.parametrize("missing", ["a", pytest.param("c", marks=pytest.mark.full)])
@pytest.mark.parametrize("wire", ["collectives", "gloo_p2p", "shared_memory"])
def test_b09_one_ranks_loss_does_without_a_unit(ranks: Pools, wire: str, missing: str, raf: bool) -> None:
    """gloo would end the process where gathers of unlike sizes meet."""
    outcomes = ranks(2).outcomes(_one_loss_misses, {"wire": wire, "reshard_after_forward": raf}, missing)
    ranks(2).is_usable = False
    for outcome in outcomes:
        assert outcome.is_ok, outcome.traceback
        assert "different" in outcome.value


# B47 ----------------------------------------------------------------------------------------------------------------


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
        ctx.where = where
        if where == "forward":
            raise ValueError("in forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.where == "backward":
            raise ValueError("in backward")
        return grad, None


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.where, self.at = "", 2

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.tower):
            x = torch.tanh(layer(x))
            if index == self.at:
                x = Explodes.apply(x, self.where)
        return x


def _failed_step(rank: Rank, options: dict[str, Any], where: str, clears: bool) -> None:
    model = Fragile()
    pair = Pair(model, units=[nn.Linear], **options)
    for step in range(3):
        batches = batches_for(rank.world_size, 3, 4, seed=step)
        if step != 1:
            pair.step(rank.rank, batches, mean_square)
            continue
        for at in (2, 0):
            model.where, model.at = where, at
            message_of(lambda b=batches: mean_square(model, b[rank.rank]).backward(), ValueError)
            assert all(p.grad is None for p in model.parameters())
            assert all("weight" not in layer.__dict__ for layer in model.tower)
        model.where = ""
        pair.step(rank.rank, batches, mean_square)
    assert is_idle(pair.sharded)


@pytest.mark.parametrize("where", ["forward", "backward"])
@every_variant
def test_b47_a_failed_step_leaves_no_trace(ranks: Pools, options: dict[str, Any], where: str) -> None:
    ranks(2).run(_failed_step, options, where, True)


def _fails_alone(rank: Rank, options: dict[str, Any], where: str) -> str:
    model = Fragile()
    fsdp_core.fully_shard(model, units=[nn.Linear], **options)
    mean_square(model, torch.ones(2, 4)).backward()
    if rank.rank == 1:
        model.where = where
    mean_square(model, torch.ones(2, 4)).backward()
    return "no error"


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("wire", ["collectives", "gloo_p2p", "shared_memory"])
def test_b47_a_rank_that_fails_alone_does_not_hang_the_others(ranks: Pools, wire: str, where: str) -> None:
    pool = ranks(2)
    first, second = pool.outcomes(_fails_and_leaves, {"wire": wire}, where)
    pool.is_usable = False
    assert second.has_died
    assert isinstance(first.error, EngineError), first
    assert "tower." in str(first.error) or "<root>" in str(first.error)


def _fails_and_leaves(rank: Rank, options: dict[str, Any], where: str) -> str:
    """As a launcher sees it: the rank that raised ends."""
    import os

    try:
        return _fails_alone(rank, options, where)
    except ValueError:
        os._exit(1)


# B48 ----------------------------------------------------------------------------------------------------------------


def _uneven_batches(rank: Rank, options: dict[str, Any]) -> list[float]:
    model = Tower()
    plain = copy.deepcopy(model)
    fsdp_core.fully_shard(model, units=[model.inner], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = [3, 1]
    batches = [batches_for(count, 2, 4, seed=index) for index, count in enumerate(counts)]
    weights = []
    for batch, weight in fsdp_core.join(model, iter(batches[rank.rank])):
        weights.append(weight)
        (mean_square(model, batch) * weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        for each in batches:
            if step < len(each):
                (mean_square(plain, each[step]) / rank.world_size).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    for name, value in fsdp_core.state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    return weights


@every_variant
def test_b48_uneven_batches_with_join(ranks: Pools, options: dict[str, Any]) -> None:
    assert ranks(2).run(_uneven_batches, options) == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]


def _leaves_early(rank: Rank, options: dict[str, Any]) -> str:
    import os

    model = Tower()
    fsdp_core.fully_shard(model, units=[model.inner], **options)
    for step in range(3):
        if step == 1 and rank.rank == 1:
            os._exit(0)
        mean_square(model, torch.ones(2, 4)).backward()
    return "no error"


@pytest.mark.parametrize("wire", ["collectives", "gloo_p2p", "shared_memory"])
def test_b48_without_join_the_message_names_unit_and_call(ranks: Pools, wire: str) -> None:
    pool = ranks(2)
    first, second = pool.outcomes(_leaves_early, {"wire": wire})
    pool.is_usable = False
    assert second.has_died and isinstance(first.error, EngineError), first
    assert "<root>" in str(first.error) or "inner" in str(first.error)


def _one_more_batch(rank: Rank, options: dict[str, Any]) -> str:
    """Rank 1 goes on to something else collective while rank 0 trains one batch more."""
    model = Tower()
    fsdp_core.fully_shard(model, units=[model.inner], **options)

    def run() -> None:
        for _ in range(2 - rank.rank):
            mean_square(model, torch.ones(2, 4)).backward()
        fsdp_core.clip_grad_norm_(model, 1.0)

    return message_of(run, EngineError)


@pytest.mark.parametrize("wire", ["gloo_p2p", "shared_memory"])
def test_b48_one_more_batch_meets_another_call(ranks: Pools, wire: str) -> None:
    pool = ranks(2)
    outcomes = pool.outcomes(_one_more_batch, {"wire": wire})
    pool.is_usable = False
    for outcome in outcomes:
        assert outcome.is_ok, outcome.traceback
        assert "norm" in outcome.value


# B49 ----------------------------------------------------------------------------------------------------------------


class Changing(nn.Module):
    """Layers in an order that the caller gives; nested units inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)) for _ in range(4))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


ORDERS = [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (0, 1), (2, 3, 0, 1)]


def _changing_orders(rank: Rank, options: dict[str, Any], nested: bool) -> list[Any]:
    model = Changing()
    chosen = [*model.layers, *(layer[0] for layer in model.layers)] if nested else list(model.layers)
    pair = Pair(model, units=chosen, **options)
    log = fsdp_core.start_trace(pair.sharded)
    with torch.no_grad():
        model(torch.ones(2, 4), ORDERS[0])
    frees = options.get("reshard_after_forward", True) and options.get("sharding_factor") != 1
    frees = frees and "wire" in options  # the default one, shared memory, has nothing to free
    rows: list[Any] = []
    for step, order in enumerate(ORDERS):
        log.clear()
        batches = batches_for(rank.world_size, 3, 4, seed=step)
        pair.step(rank.rank, batches, lambda m, b, order=order: m(b, order).pow(2).mean())
        limit = contexts_in(pair.sharded)[0].limiter.max_inflight
        assert check_schedule(log.events, max_inflight=limit) == []
        gathers = [unit for kind, unit in log.rows("gather") if unit != "<root>"]
        for index in order:
            count = gathers.count(f"layers.{index}")
            is_last = index == order[-1]
            stray = options.get("forward_prefetch", False) and step > 0
            expected = 2 if frees and not is_last else 1
            assert count == expected or (stray and count == expected + 1), (order, index, gathers)
        rows.append([event for event in log.events if event.kind in ("gather", "reduce")])
        assert is_idle(pair.sharded)
    return rows


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("forward_prefetch", [False, True], ids=["", "forward_prefetch"])
@every_variant
def test_b49_orders_that_change(ranks: Pools, options: dict[str, Any], forward_prefetch: bool, nested: bool) -> None:
    logs = ranks(2).run(_changing_orders, {**options, "forward_prefetch": forward_prefetch}, nested)
    for first, second in zip(*logs, strict=True):
        assert first_difference([first, second]) == ""


# B50 ----------------------------------------------------------------------------------------------------------------


def _limited(rank: Rank, options: dict[str, Any], limit: RateLimit) -> tuple[int, int, int]:
    model = Fragile()
    pair = Pair(model, units=[nn.Linear], rate_limit=limit, **options)
    log = fsdp_core.start_trace(pair.sharded)
    for step in range(3):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
    assert check_schedule(log.events, max_inflight=limit.max_inflight if limit.kind == "fixed" else None) == []
    context = contexts_in(pair.sharded)[0]
    peak = context.resources.pool.peak_live
    return context.limiter.peak_inflight, peak.get(BufferRole.FULL, 0), peak.get(BufferRole.GRAD_FULL, 0)


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "forward_prefetch"])
@pytest.mark.parametrize("max_inflight", [1, 2, 3])
@pytest.mark.parametrize("name", ["raf", "allocator", "nraf"])
def test_b50_never_more_in_flight_than_asked(ranks: Pools, name: str, max_inflight: int, prefetch: bool) -> None:
    from tests.fsdp_core.behaviours.variants import VARIANTS

    options = {**VARIANTS[name], "forward_prefetch": prefetch}
    for inflight, full, sources in ranks(2).run(_limited, options, RateLimit(max_inflight)):
        assert 1 <= inflight <= max_inflight
        assert sources <= 3
        if name != "nraf":  # the last unit is kept; the root holds nothing here
            assert full <= max_inflight + 1


@two_variants
def test_b50_unlimited(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_limited, options, RateLimit(kind="unlimited"))
