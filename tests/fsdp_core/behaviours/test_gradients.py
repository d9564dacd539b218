"""Behaviours of freezing, accumulation and the numbers of gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core import MixedPrecision, ShardedGradScaler
from fsdp_core.errors import NumericsError
from fsdp_core.runtime.find import contexts_in
from tests.fsdp_core.behaviours.variants import Tower, every_variant, message_of, two_variants
from tests.support.parity import Pair, batches_for, is_idle, mean_square, whole
from tests.support.ranks import Pools, Rank

# B24 ----------------------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A frozen base with a small trainable pair beside it."""

    def __init__(self, width: int = 16, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


def _low_rank(rank: Rank, options: dict[str, Any]) -> tuple[int, int]:
    model = nn.Sequential(LowRank(), LowRank())
    pair = Pair(model, units=[LowRank], **options)
    wire = contexts_in(pair.sharded)[0].root.groups.shard
    for step in range(2):
        batches = batches_for(rank.world_size, 3, 16, seed=step)
        pair.plain_gradients(batches, mean_square)
        loss = mean_square(pair.sharded, batches[rank.rank])
        wire.counter.reset()
        loss.backward()
        counted = wire.counter.intra_host_bytes.get("reduce_scatter", 0)
        pair.finish_step()
    assert all(p.grad is None for p in pair.sharded.parameters() if not p.requires_grad)
    trainable = sum(p.numel() for p in pair.sharded.parameters() if p.requires_grad)
    assert is_idle(pair.sharded)
    return counted, trainable


@every_variant
def test_b24_only_trainable_elements_are_reduced(ranks: Pools, options: dict[str, Any]) -> None:
    for counted, trainable in ranks(2).run(_low_rank, options):
        assert counted == (0 if options.get("sharding_factor") == 1 else trainable * 4 // 2)


# B25 ----------------------------------------------------------------------------------------------------------------


def _flips(rank: Rank, options: dict[str, Any], start_frozen: bool) -> None:
    model = Tower()
    model.inner[0].requires_grad_(not start_frozen)
    pair = Pair(model, units=[model.inner], **options)
    for step in range(6):
        if step == 2:
            for one in (pair.plain, pair.sharded):
                one.inner[0].requires_grad_(start_frozen)
                one.last.bias.requires_grad_(False)
        if step == 4:
            for one in (pair.plain, pair.sharded):
                one.inner[0].requires_grad_(not start_frozen)
                one.last.bias.requires_grad_(True)
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
        for name, parameter in pair.sharded.named_parameters():
            assert parameter.grad is None, name
    assert is_idle(pair.sharded)


@pytest.mark.parametrize("start_frozen", [True, False], ids=["unfreeze", "freeze"])
@every_variant
def test_b25_requires_grad_may_change_midway(ranks: Pools, options: dict[str, Any], start_frozen: bool) -> None:
    ranks(2).run(_flips, options, start_frozen)


# B26 ----------------------------------------------------------------------------------------------------------------


def _many_micro_batches(rank: Rank, options: dict[str, Any]) -> float:
    model = Tower()
    low = copy.deepcopy(model).bfloat16()
    fsdp_core.fully_shard(model, mixed_precision=MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32), **options)
    sums: dict[str, Tensor] = {}
    for index in range(64):
        batches = batches_for(rank.world_size, 2, 4, seed=index)
        for batch in batches:
            low.zero_grad()
            low(batch.bfloat16()).float().mean().backward()
            for name, parameter in low.named_parameters():
                sums[name] = sums.get(name, 0) + parameter.grad.float() / rank.world_size
        loss = model(batches[rank.rank]).float().mean()
        if index < 63:
            with fsdp_core.no_sync(model):
                loss.backward()
        else:
            loss.backward()
    return max(((whole(p.grad) - sums[name]).norm() / sums[name].norm()).item() for name, p in model.named_parameters())


@every_variant
def test_b26_unsynchronised_sums_are_kept_in_the_reduce_dtype(ranks: Pools, options: dict[str, Any]) -> None:
    assert max(ranks(2).run(_many_micro_batches, options)) < 2e-3


# B27 ----------------------------------------------------------------------------------------------------------------


def _cleared(rank: Rank, options: dict[str, Any], set_to_none: bool, kind: str) -> None:
    model = Tower()
    pair = Pair(model, units=[model.inner], **options)
    flat, partly = kind.startswith("flat"), kind.endswith("partly")
    if flat:
        pair.optimizer = torch.optim.SGD(fsdp_core.flat_parameters(pair.sharded), lr=0.5)
    for step in range(2):
        lost = batches_for(rank.world_size, 3, 4, seed=step + 10)
        with fsdp_core.no_sync(pair.sharded):
            mean_square(pair.sharded, lost[rank.rank]).backward()
        if partly:  # what is not cleared stays
            pair.plain_gradients(lost, mean_square)
            for one in (pair.plain, pair.sharded):
                one.inner[0].zero_grad(set_to_none)
        elif kind == "flat":
            pair.optimizer.zero_grad(set_to_none)
        else:
            pair.sharded.zero_grad(set_to_none)
        kept = batches_for(rank.world_size, 3, 4, seed=step)
        pair.plain_gradients(kept, mean_square)
        mean_square(pair.sharded, kept[rank.rank]).backward()
        pair.finish_step()


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("kind", ["named", "flat", "flat by name", "named partly", "flat partly"])
@every_variant
def test_b27_cleared_sums_do_not_come_back(ranks: Pools, options: dict[str, Any], set_to_none: bool, kind: str) -> None:
    ranks(2).run(_cleared, options, set_to_none, kind)


# B28 ----------------------------------------------------------------------------------------------------------------


def _data_parallel(rank: Rank, factor: int) -> None:
    model = Tower()
    pair = Pair(model, units=[model.inner], sharding_factor=factor)
    for micro in range(8):
        batches = batches_for(rank.world_size, 3, 4, seed=micro)
        pair.plain_gradients(batches, mean_square)
        mean_square(pair.sharded, batches[rank.rank]).backward()
    pair.finish_step()


@pytest.mark.parametrize(("world_size", "factor"), [(2, 1), (4, 1), (4, 2), (4, 4)])
def test_b28_eight_micro_batches_with_communication(ranks: Pools, world_size: int, factor: int) -> None:
    ranks(world_size).run(_data_parallel, factor)


# B29 ----------------------------------------------------------------------------------------------------------------


def _large_fp16(rank: Rank, factor: int) -> list[float]:
    model = nn.Linear(4, 4, bias=False)
    policy = MixedPrecision(reduce_dtype=torch.float16)
    fsdp_core.fully_shard(model, sharding_factor=factor, mixed_precision=policy)
    (model(torch.ones(1, 4)) * 3e4).sum().backward()
    return whole(model.weight.grad).unique().tolist()


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_b29_fp16_averages_do_not_overflow(ranks: Pools, factor: int) -> None:
    for values in ranks(4).run(_large_fp16, factor):
        assert values == [3e4]


# B30 ----------------------------------------------------------------------------------------------------------------


def _token_weighted(rank: Rank, options: dict[str, Any]) -> None:
    model = Tower()
    pair = Pair(model, units=[model.inner], **options)
    fsdp_core.set_gradient_divide_factor(pair.sharded, 1)
    tokens = [3, 9]
    batches = [torch.randn(count, 4, generator=torch.Generator().manual_seed(count)) for count in tokens]
    pair.plain(torch.cat(batches)).pow(2).sum(1).mean().backward()
    (pair.sharded(batches[rank.rank]).pow(2).sum(1).sum() / sum(tokens)).backward()
    pair.finish_step()


@every_variant
def test_b30_token_weighted_means(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_token_weighted, options)


# B31 ----------------------------------------------------------------------------------------------------------------


class WithTiny(nn.Module):
    """One trainable element: all ranks but one hold nothing that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def _overflow(rank: Rank, factor: int, tiny: bool) -> tuple[float, ...]:
    model = WithTiny() if tiny else Tower()
    pair = Pair(model, lr=0.1, sharding_factor=factor)
    scaler = ShardedGradScaler(pair.sharded, init_scale=8.0, growth_interval=100)
    scales = []
    for step in range(3):
        batches = batches_for(rank.world_size, 3, 4, seed=step)
        before = fsdp_core.state_dict(pair.sharded)
        loss = mean_square(pair.sharded, batches[rank.rank])
        if step == 1 and rank.rank == rank.world_size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(pair.optimizer)
        scaler.update()
        pair.optimizer.zero_grad()
        scales.append(scaler.get_scale())
        after = fsdp_core.state_dict(pair.sharded)
        moved = any(not torch.equal(before[name], after[name]) for name in before)
        assert moved == (step != 1)
        if step != 1:
            pair.plain_gradients(batches, mean_square)
            pair.plain_optimizer.step()
            pair.plain.zero_grad()
            pair.check_parameters()
    return tuple(scales)


@pytest.mark.parametrize("tiny", [False, True], ids=["tower", "one element"])
@pytest.mark.parametrize(("world_size", "factor"), [(2, 1), (2, 2), (4, 2)])
def test_b31_an_overflow_on_one_rank_is_seen_by_all(ranks: Pools, world_size: int, factor: int, tiny: bool) -> None:
    for scales in ranks(world_size).run(_overflow, factor, tiny):
        assert scales == (8.0, 4.0, 4.0)


# B32 ----------------------------------------------------------------------------------------------------------------


def _clip(rank: Rank, options: dict[str, Any], norm_type: float) -> float:
    model = Tower()
    pair = Pair(model, units=[model.inner], **options)
    batches = batches_for(rank.world_size, 3, 4)
    pair.plain_gradients(batches, mean_square)
    mean_square(pair.sharded, batches[rank.rank]).backward()
    expected = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01, norm_type)
    norm = fsdp_core.clip_grad_norm_(pair.sharded, 0.01, norm_type)
    torch.testing.assert_close(norm, expected)
    assert norm.dim() == 0 and type(norm) is Tensor
    pair.finish_step()
    mean_square(pair.sharded, batches[rank.rank]).backward()
    pair.plain_gradients(batches, mean_square)
    torch.testing.assert_close(
        torch.nn.utils.clip_grad_norm_(pair.sharded.parameters(), 0.02, norm_type),
        torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.02, norm_type),
    )  # torch's own works too
    pair.finish_step()
    return norm.item()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@every_variant
def test_b32_clipping(ranks: Pools, options: dict[str, Any], norm_type: float) -> None:
    first, second = ranks(2).run(_clip, options, norm_type)
    assert first == second


def _not_finite(rank: Rank) -> str:
    model = fsdp_core.fully_shard(Tower())
    loss = mean_square(model, torch.ones(2, 4))
    (loss * (float("nan") if rank.rank == 1 else 1.0)).backward()
    before = [p.grad.local.clone() for p in model.parameters()]
    message = message_of(lambda: fsdp_core.clip_grad_norm_(model, 1.0, error_if_nonfinite=True), NumericsError)
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad.local, old, equal_nan=True, rtol=0, atol=0)
    return message


def test_b32_a_norm_that_is_not_finite_raises_on_all_ranks(ranks: Pools) -> None:
    for message in ranks(2).run(_not_finite):
        assert "not finite" in message


def _mixed_factors(rank: Rank) -> None:
    """The inner unit replicates, the rest is sharded."""
    model = Tower()
    plain = copy.deepcopy(model)
    fsdp_core.fully_shard(model.inner, sharding_factor=1)
    pair = Pair(plain)
    pair.sharded = fsdp_core.fully_shard(model)
    pair.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        batches = batches_for(rank.world_size, 3, 4, seed=step)
        pair.plain_gradients(batches, mean_square)
        mean_square(model, batches[rank.rank]).backward()
        pair.check_gradients()
        torch.testing.assert_close(
            fsdp_core.clip_grad_norm_(model, 0.1), torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1)
        )
        pair.finish_step()
    assert is_idle(model)


def test_b32_mixed_factors(ranks: Pools) -> None:
    ranks(2).run(_mixed_factors)
    ranks(4).run(_mixed_factors)


@two_variants
def test_whole_models_gradients_are_visible_in_full_parameters(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_full_with_grads, options)


def _full_with_grads(rank: Rank, options: dict[str, Any]) -> None:
    model = Tower()
    pair = Pair(model, units=[model.inner], **options)
    batches = batches_for(rank.world_size, 3, 4)
    pair.plain_gradients(batches, mean_square)
    mean_square(pair.sharded, batches[rank.rank]).backward()
    with fsdp_core.full_parameters(pair.sharded, with_grads=True):
        for (name, p), (_, q) in zip(pair.sharded.named_parameters(), pair.plain.named_parameters(), strict=True):
            assert type(p) is nn.Parameter and p.shape == q.shape
            torch.testing.assert_close(p.grad, q.grad, msg=name)
        with torch.no_grad():
            pair.sharded.last.weight.mul_(2)
            pair.plain.last.weight.mul_(2)
    pair.finish_step()


def test_only_parameters_that_a_penalty_looks_at_call_back_in_backward() -> None:
    model = fsdp_core.fully_shard(tower := Tower(), units=[tower.inner])
    optimizer = torch.optim.AdamW(model.parameters())
    mean_square(model, torch.ones(2, 4)).backward()
    fsdp_core.clip_grad_norm_(model, 1.0)
    optimizer.step()
    called = [name for name, p in model.named_parameters() if p._backward_hooks]
    assert called == []
    model.last.weight.pow(2).sum().backward()
    assert [name for name, p in model.named_parameters() if p._backward_hooks] == ["last.weight"]
