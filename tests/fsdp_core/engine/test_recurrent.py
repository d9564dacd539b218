"""RNN, LSTM and GRU keep lists of their weights: the lists follow the unit, and keep no gathered buffer."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_core.comm.wire import BufferRole
from fsdp_core.runtime.find import contexts_in
from tests.support.parity import Pair, batches_for, is_idle, mean_square
from tests.support.ranks import Pools, Rank

OPTIONS: dict[str, dict[str, Any]] = {
    "raf": {"wire": "collectives"},
    "nraf": {"wire": "collectives", "reshard_after_forward": False},
    "f1": {"sharding_factor": 1},
    "default": {},
}


class Reader(nn.Module):
    """[rows, 4] to [rows, 2], each row a step of time; the recurrent part may be run again in backward."""

    def __init__(self, kind: str, is_checkpointed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        maker = getattr(nn, kind)
        self.cell = maker(3, 5, num_layers=2, bidirectional=True) if kind == "LSTM" else maker(3, 10)
        self.last = nn.Linear(10, 2)
        self.is_checkpointed = is_checkpointed

    def read(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.read, x, use_reentrant=False) if self.is_checkpointed else self.read(x)
        return self.last(x)


def _train(rank: Rank, kind: str, is_unit: bool, is_checkpointed: bool, options: dict[str, Any]) -> None:
    model = Reader(kind, is_checkpointed)
    pair = Pair(model, units=[model.cell] if is_unit else None, **options)
    for step in range(3):
        pair.step(rank.rank, batches_for(rank.world_size, 6, 4, seed=step), mean_square)
        with torch.no_grad():
            pair.sharded(torch.randn(6, 4))
    assert is_idle(pair.sharded)
    gc.collect()
    (context,) = contexts_in(pair.sharded)
    free = [one for key, some in context.resources.pool._free.items() if key[1] is BufferRole.FULL for one in some]
    assert not any(buffer.is_used_elsewhere() for buffer in free), "the module still holds gathered weights"
    copied = copy.deepcopy(pair.sharded)
    mean_square(copied, torch.randn(6, 4)).backward()
    assert is_idle(copied)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(
    ("kind", "is_unit", "is_checkpointed"),
    [("GRU", False, False), ("GRU", True, False), ("GRU", True, True), ("GRU", False, True), ("LSTM", True, False)],
)
def test_recurrent_modules_train(
    ranks: Pools, kind: str, is_unit: bool, is_checkpointed: bool, options: dict[str, Any]
) -> None:
    ranks(2).run(_train, kind, is_unit, is_checkpointed, options)
