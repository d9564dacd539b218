"""What a GPU would do with the engine's streams and events, checked without one: no race, no decision by timing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fsdp_core
from fsdp_core import MixedPrecision, RateLimit
from tests.fsdp_core.engine.test_parity import Block, Net
from tests.fsdp_core.streams.modelled import LAGS, modelled_device
from tests.support.parity import Pair, batches_for, mean_square
from tests.support.ranks import Pools, Rank

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "nraf": {"reshard_after_forward": False},
    "f1": {"sharding_factor": 1},
    "early": {"is_early": True},
    "early_f1": {"is_early": True, "sharding_factor": 1},
    "forward_prefetch": {"forward_prefetch": True},
    "limit1": {"rate_limit": RateLimit(1)},
    "limit3": {"rate_limit": RateLimit(3), "forward_prefetch": True},
    "unlimited": {"rate_limit": RateLimit(kind="unlimited"), "forward_prefetch": True},
    "allocator": {"gather_buffers": "allocator"},
    "converted": {"mixed_precision": MixedPrecision(param_dtype=torch.float64)},  # wider, so that nothing rounds
}


def _train(rank: Rank, options: dict[str, Any], lag: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Rows of the trace, and races. Each rank's device lags in its own way."""
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
            pair.finish_step()
            with torch.no_grad():
                pair.sharded(batches[rank.rank])
        rows = log.rows("gather", "reduce", "free")
    return rows, sorted(set(device.races))


CASES = [("now and then", name) for name in SETTINGS]
CASES += [("far behind", name) for name in ("default", "nraf", "limit3")] + [("close behind", "default")]


@pytest.mark.parametrize(("lag", "name"), CASES)
def test_no_race_and_the_same_collectives_on_every_rank(ranks: Pools, lag: str, name: str) -> None:
    (rows, races), (others, other_races) = ranks(2).run(_train, SETTINGS[name], lag, timeout_s=120.0)
    assert races == [] and other_races == []
    assert rows == others, "ranks whose devices lag differently issue different collectives"


@pytest.mark.parametrize("lag", LAGS)
def test_backward_gathers_stay_ahead_of_reductions(ranks: Pools, lag: str) -> None:
    """On a wire that works in order, a gather behind the reduction of the unit before it could overlap nothing."""
    (rows, _), _ = ranks(2).run(_train, SETTINGS["default"], lag, timeout_s=120.0)
    first = rows[rows.index(("reduce", "blocks.3")) - 4 : rows.index(("reduce", "<root>"))]
    order = [row for row in first if row[0] != "free"]
    assert order[-7:] == [
        ("gather", "blocks.2"),
        ("reduce", "blocks.3"),
        ("gather", "blocks.1"),
        ("reduce", "blocks.2"),
        ("gather", "blocks.0"),
        ("reduce", "blocks.1"),
        ("reduce", "blocks.0"),
    ]
