"""What a GPU would do with the engine's streams and events, checked without one: no race, no decision by timing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fsdp_core
from fsdp_core import MixedPrecision, RateLimit
from tests.fsdp_core.engine.test_parity import Block, Net
from tests.fsdp_core.streams.modelled import LAGS, modelled_device
from tests.support.parity import Pair, batches_for, is_idle, mean_square
from tests.support.ranks import Pools, Rank

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "nraf": {"reshard_after_forward": False},
    "f1": {"sharding_factor": 1},
    "forward_prefetch": {"forward_prefetch": True},
    "limit1": {"rate_limit": RateLimit(1)},
    "limit3": {"rate_limit": RateLimit(3), "forward_prefetch": True},
    "unlimited": {"rate_limit": RateLimit(kind="unlimited"), "forward_prefetch": True},
    "allocator": {"gather_buffers": "allocator"},
    "low": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
}


def _train(rank: Rank, options: dict[str, Any], lag: str, flat: bool) -> tuple[list[tuple[str, str]], list[str]]:
    """Rows of the trace, and races. Each rank's device lags in its own way."""
    low = "mixed_precision" in options
    tolerance = {"rtol": 0.1, "atol": 0.1} if low else {}
    with modelled_device(lag, seed=rank.rank) as device:
        pair = Pair(Net(depth=4), units=[Block], wire="collectives", **options)
        log = fsdp_core.start_trace(pair.sharded)
        for step in range(3):
            batches = batches_for(rank.world_size, 4, 3, seed=step)
            if step == 1:  # one micro-batch on its own first
                pair.plain_gradients(batches, mean_square)
                with fsdp_core.no_sync(pair.sharded):
                    mean_square(pair.sharded, batches[rank.rank]).backward()
            if step == 2:  # and one with communication
                pair.plain_gradients(batches, mean_square)
                mean_square(pair.sharded, batches[rank.rank]).backward()
            pair.plain_gradients(batches, mean_square)
            mean_square(pair.sharded, batches[rank.rank]).backward()
            fsdp_core.clip_grad_norm_(pair.sharded, 1e6)
            pair.finish_step(**tolerance)
            with torch.no_grad():
                pair.sharded(batches[rank.rank])
        rows = log.rows("gather", "reduce", "free")
    return rows, sorted(set(device.races))


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_no_race_and_the_same_collectives_on_every_rank(ranks: Pools, options: dict[str, Any], lag: str) -> None:
    (rows, races), (others, other_races) = ranks(2).run(_train, options, lag, False)
    assert races == [] and other_races == []
    assert rows == others, "ranks whose devices lag differently issue different collectives"
