"""The order of a whole step, written out, for three units below a root."""

from __future__ import annotations

from typing import Any

from torch import nn

import fsdp_core
from fsdp_core.trace.schedule_check import check_schedule
from tests.support.parity import Pair, batches_for, mean_square
from tests.support.ranks import Pools, Rank


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.out(self.c(self.b(self.a(x))))


def _events(rank: Rank, options: dict[str, Any]) -> list[str]:
    model = Three()
    pair = Pair(model, units=[model.a, model.b, model.c], wire="collectives", **options)
    pair.step(rank.rank, batches_for(rank.world_size, 3, 4), mean_square)
    log = fsdp_core.start_trace(pair.sharded)
    pair.step(rank.rank, batches_for(rank.world_size, 3, 4), mean_square)
    fsdp_core.stop_trace(pair.sharded)
    assert check_schedule(log.events, max_inflight=2) == []
    names = {"<root>": "root"}
    return [
        f"{e.kind} {names.get(e.unit, e.unit)}".strip() + (" early" if e.phase == "prefetch" else "")
        for e in log.events
    ]


def test_reshard_after_forward_with_backward_prefetch(ranks: Pools) -> None:
    """``a`` is not gathered for backward: its input needs no gradient, so autograd saved none of its weights."""
    rows = ranks(2).run(_events, {})[0]
    assert rows == [
        "pass",
        "gather root", "wait root", "forward root",
        "gather a", "wait a", "forward a", "forward_end a",
        "free a", "gather b", "wait b", "forward b", "forward_end b",
        "free b", "gather c", "wait c", "forward c", "forward_end c",
        "forward_end root",
        "keep c",
        "backward c", "gather b early", "gradients c", "free c", "reduce c",
        "backward b", "wait b", "gradients b", "free b", "reduce b",
        "backward a", "gradients a", "reduce a",
        "backward root", "gradients root", "free root", "reduce root",
        "backward_end",
    ]  # fmt: skip


def test_kept_after_forward(ranks: Pools) -> None:
    rows = ranks(2).run(_events, {"reshard_after_forward": False})[0]
    assert rows == [
        "pass",
        "gather root", "wait root", "forward root",
        "gather a", "wait a", "forward a", "forward_end a", "keep a",
        "gather b", "wait b", "forward b", "forward_end b", "keep b",
        "gather c", "wait c", "forward c", "forward_end c", "keep c",
        "forward_end root",
        "backward c", "gradients c", "free c", "reduce c",
        "backward b", "gradients b", "free b", "reduce b",
        "backward a", "gradients a", "free a", "reduce a",
        "backward root", "gradients root", "free root", "reduce root",
        "backward_end",
    ]  # fmt: skip


def test_forward_prefetch(ranks: Pools) -> None:
    rows = ranks(2).run(_events, {"forward_prefetch": True})[0]
    start = rows.index("pass")
    assert rows[start : rows.index("backward c")] == [
        "pass",
        "gather root", "wait root", "gather a early", "forward root",
        "wait a", "gather b early", "forward a", "forward_end a",
        "free a", "wait b", "gather c early", "forward b", "forward_end b",
        "free b", "wait c", "forward c", "forward_end c",
        "forward_end root",
        "keep c",
    ]  # fmt: skip
