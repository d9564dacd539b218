"""Several reductions of one unit in one backward: one gradient, one call of each hook."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.parity import Pair, batches_for, is_idle, mean_square
from tests.support.ranks import Pools, Rank


class TwiceRecomputed(nn.Module):
    """Each reentrant checkpoint is a backward of its own inside the backward: the block reduces twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True).tanh()
        return self.last(x)


def _hooks(rank: Rank, options: dict[str, Any]) -> None:
    model = TwiceRecomputed()
    pair = Pair(model, units=[model.block], **options)
    calls: list[str] = []
    for one in (pair.plain, pair.sharded):
        one.block.weight.register_hook(lambda grad: grad * 2)
    pair.sharded.block.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("after"))
    for step in range(2):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
    assert calls == ["after"] * 2
    assert is_idle(pair.sharded)


@pytest.mark.parametrize(
    "options", [{"wire": "collectives"}, {}, {"sharding_factor": 1}, {"cpu_offload": True}], ids=str
)
def test_hooks_meet_the_sum_of_two_reductions_once(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_hooks, options, timeout_s=120.0)
