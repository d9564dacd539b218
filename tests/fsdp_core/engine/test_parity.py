"""Sharded training equals plain training: F, RAF/NRAF, buffers, wires, precision, accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdp_core
from fsdp_core import MixedPrecision, RateLimit
from tests.support.parity import Pair, batches_for, is_idle, mean_square
from tests.support.ranks import Pools, Rank


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks between two layers of the root."""

    def __init__(self, width: int = 5, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _train(rank: Rank, options: dict[str, Any], steps: int = 3) -> list[tuple[str, str]]:
    pair = Pair(Net(), units=[Block], **options)
    for step in range(steps):
        pair.step(rank.rank, batches_for(rank.world_size, 4, 3, seed=step), mean_square)
    assert is_idle(pair.sharded)
    return []


@pytest.mark.parametrize("raf", [True, False], ids=["raf", "nraf"])
@pytest.mark.parametrize(
    ("world_size", "factor"),
    [(2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (4, 4), *(pytest.param(6, f, marks=pytest.mark.full) for f in (2, 3, 6))],
)
@pytest.mark.parametrize("wire", ["collectives", "gloo_p2p", "shared_memory"])
def test_parity_of_every_factor(ranks: Pools, world_size: int, factor: int, raf: bool, wire: str) -> None:
    ranks(world_size).run(_train, {"sharding_factor": factor, "reshard_after_forward": raf, "wire": wire})


@pytest.mark.parametrize(
    "options",
    [
        {"gather_buffers": "allocator"},
        {"forward_prefetch": True},
        {"backward_prefetch": False},
        {"rate_limit": RateLimit(1)},
        {"rate_limit": RateLimit(3)},
        {"rate_limit": RateLimit(kind="unlimited")},
        {"cpu_offload": True},
        {"is_early": True},
        {"is_early": True, "sharding_factor": 1},
    ],
    ids=lambda options: "-".join(f"{k}" for k in options),
)
@pytest.mark.parametrize("wire", ["collectives", "auto"])
def test_parity_of_every_setting(ranks: Pools, options: dict[str, Any], wire: str) -> None:
    ranks(2).run(_train, {**options, "wire": wire})


def test_one_rank_needs_no_process_group() -> None:
    torch.manual_seed(0)
    pair = Pair(Net(), units=[Block])
    for step in range(3):
        pair.step(0, batches_for(1, 4, 3, seed=step), mean_square, rtol=0, atol=0)
    assert is_idle(pair.sharded)


def _bf16(rank: Rank, raf: bool, reduce_dtype: torch.dtype | None, wire: str) -> float:
    torch.manual_seed(0)
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    pair = Pair(Net(), units=[Block], mixed_precision=policy, reshard_after_forward=raf, wire=wire)
    batches = batches_for(rank.world_size, 8, 3)
    low = __import__("copy").deepcopy(pair.plain).bfloat16()
    expected: dict[str, torch.Tensor] = {}
    for batch in batches:
        low.zero_grad()
        mean_square(low, batch.bfloat16()).backward()
        for name, parameter in low.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad.float() / len(batches)
    mean_square(pair.sharded, batches[rank.rank]).backward()
    worst = 0.0
    for name, parameter in pair.sharded.named_parameters():
        from tests.support.parity import whole

        grad = whole(parameter.grad)
        assert grad.dtype == torch.float32
        worst = max(worst, ((grad - expected[name]).norm() / expected[name].norm()).item())
    assert is_idle(pair.sharded)
    return worst


@pytest.mark.parametrize("wire", ["collectives", "auto"])
@pytest.mark.parametrize("raf", [True, False], ids=["raf", "nraf"])
def test_bf16_compute_reduces_in_the_asked_dtype(ranks: Pools, raf: bool, wire: str) -> None:
    assert max(ranks(2).run(_bf16, raf, torch.float32, wire)) < 1e-6
    assert max(ranks(2).run(_bf16, raf, None, wire)) < 8e-3


def _accumulate(rank: Rank, with_communication: bool, factor: int, flat: bool, cpu_offload: bool = False) -> None:
    model = Net()
    pair = Pair(model, units=[Block], sharding_factor=factor, cpu_offload=cpu_offload)
    if flat:
        pair.optimizer = torch.optim.SGD(fsdp_core.flat_parameters(model), lr=0.5)
    micro = [batches_for(rank.world_size, 4, 3, seed=seed) for seed in range(3)]
    for _ in range(2):
        for index, batches in enumerate(micro):
            pair.plain_gradients(batches, mean_square)
            if with_communication or index == len(micro) - 1:
                mean_square(pair.sharded, batches[rank.rank]).backward()
            else:
                with fsdp_core.no_sync(pair.sharded):
                    mean_square(pair.sharded, batches[rank.rank]).backward()
        pair.finish_step()
    assert is_idle(pair.sharded)


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("with_communication", [True, False], ids=["synced", "unsynced"])
def test_accumulation(ranks: Pools, with_communication: bool, factor: int) -> None:
    ranks(2).run(_accumulate, with_communication, factor, False)


@pytest.mark.parametrize("flat", [False, True], ids=["named", "flat"])
@pytest.mark.parametrize("with_communication", [True, False], ids=["synced", "unsynced"])
def test_accumulation_in_host_memory(ranks: Pools, with_communication: bool, flat: bool) -> None:
    for factor in (1, 2):
        ranks(2).run(_accumulate, with_communication, factor, flat, True)


def _flat(rank: Rank, factor: int) -> None:
    model = Net()
    plain = __import__("copy").deepcopy(model)
    fsdp_core.fully_shard(model, units=[Block], sharding_factor=factor)
    flats = fsdp_core.flat_parameters(model)
    optimizer = torch.optim.AdamW(flats, lr=0.01)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(4):
        batches = batches_for(rank.world_size, 4, 3, seed=step)
        for batch in batches:
            (mean_square(plain, batch) / rank.world_size).backward()
        if step == 2:
            with fsdp_core.no_sync(model):
                mean_square(model, batches[rank.rank]).backward()
            model.zero_grad()
            optimizer.zero_grad()
        mean_square(model, batches[rank.rank]).backward()
        norm = fsdp_core.clip_grad_norm_(model, 0.1)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(norm, expected)
        for one in (optimizer, plain_optimizer):
            one.step()
            one.zero_grad()
    for name, value in fsdp_core.state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    saved = fsdp_core.optim_state_dict(model, optimizer)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(saved["state"][name]["exp_avg"], plain_optimizer.state[parameter]["exp_avg"])


@pytest.mark.parametrize("factor", [1, 2])
def test_flat_parameters_train_like_plain_ones(ranks: Pools, factor: int) -> None:
    ranks(2).run(_flat, factor)
