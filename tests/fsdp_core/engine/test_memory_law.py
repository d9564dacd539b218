"""How much is gathered at once, read from the trace; how much stays, read from the report."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fsdp_core
from fsdp_core import MixedPrecision, RateLimit
from fsdp_core.trace.events import Event
from tests.fsdp_core.engine.test_parity import Block, Net
from tests.support.parity import batches_for, mean_square
from tests.support.ranks import Pools, Rank

DEPTH = 5


def _peak_bytes(events: list[Event]) -> int:
    """The most that was gathered at any time."""
    now = peak = 0
    for event in events:
        if event.kind in ("gather", "free"):
            now += event.nbytes if event.kind == "gather" else -event.nbytes
            peak = max(peak, now)
    assert now == 0
    return peak


def _gathered(rank: Rank, limit: RateLimit, options: dict[str, Any]) -> tuple[int, int, int, int]:
    model = fsdp_core.fully_shard(Net(depth=DEPTH), units=[Block], rate_limit=limit, wire="collectives", **options)
    batch = batches_for(rank.world_size, 4, 3)[rank.rank]
    log = fsdp_core.start_trace(model)
    for _ in range(2):
        mean_square(model, batch).backward()
    report = fsdp_core.describe(model)
    itemsize = 2 if "mixed_precision" in options else 4
    everything = sum(flat.padded_numel * itemsize for unit in report.units for flat in unit.flat_parameters)
    return _peak_bytes(log.events), report.root_unit_bytes, report.largest_unit_bytes, everything


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("forward_prefetch", [False, True], ids=["", "forward_prefetch"])
@pytest.mark.parametrize("max_inflight", [1, 2, 3])
def test_gathered_with_reshard_after_forward(
    ranks: Pools, max_inflight: int, forward_prefetch: bool, low: bool
) -> None:
    """The root, the last unit of the forward, and as many units as may be in flight."""
    options: dict[str, Any] = {"forward_prefetch": forward_prefetch}
    if low:
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32)
    for peak, root, largest, everything in ranks(2).run(_gathered, RateLimit(max_inflight), options):
        assert root + largest <= peak <= root + (1 + max_inflight) * largest
        assert peak < everything


def test_gathered_when_kept_after_forward(ranks: Pools) -> None:
    for peak, _, _, everything in ranks(2).run(_gathered, RateLimit(2), {"reshard_after_forward": False}):
        assert peak == everything


def _kept(rank: Rank, factor: int) -> None:
    model = fsdp_core.fully_shard(Net(), units=[Block], sharding_factor=factor)
    report = fsdp_core.describe(model)
    flats = [flat for unit in report.units for flat in unit.flat_parameters]
    assert all(0 <= flat.padded_numel - flat.numel < factor for flat in flats)
    assert report.shard_bytes == sum(flat.padded_numel // factor * 4 for flat in flats)
    mean_square(model, torch.ones(1, 3)).backward()
    optimizer = torch.optim.AdamW(fsdp_core.flat_parameters(model), fused=True)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim() == 1]
    grads = [flat.grad for flat in fsdp_core.flat_parameters(model)]
    assert sum(grad.nbytes for grad in grads) == report.shard_bytes
    assert sum(moment.nbytes for moment in moments) == 2 * report.shard_bytes


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_what_stays_is_one_part_in_f(ranks: Pools, factor: int) -> None:
    """Parameters, gradients and each moment of Adam: the padded elements over F."""
    ranks(4).run(_kept, factor)
