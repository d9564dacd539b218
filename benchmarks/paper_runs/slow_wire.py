"""A wire that takes as long as a network would: what leaves a rank goes through one card, message after message.

The bytes really travel (``gloo_p2p``); on top of that a collective is complete only when a card of the given rate and
latency would have sent it. Waiting sleeps, so a core is free meanwhile, as it is when a network card works.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from fsdp_core.comm import groups
from fsdp_core.comm.gloo_p2p import GlooP2PWire
from fsdp_core.comm.select import WireSelection
from fsdp_core.comm.wire import Label, ReduceOp, Work


@dataclass
class Card:
    """Of one rank. bytes_per_s, latency_s: of one collective, whatever its kind."""

    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    free_at: float = 0.0  # seconds of the clock

    def book(self, nbytes: float) -> float:
        """When a message that is handed over now has left."""
        self.free_at = max(time.perf_counter(), self.free_at) + self.latency_s + nbytes / self.bytes_per_s
        return self.free_at


class SlowWork(Work):
    def __init__(self, work: Work, done_at: float) -> None:
        self._work, self._done_at = work, done_at

    def wait(self) -> None:
        self._work.wait()
        left_s = self._done_at - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._done_at and self._work.is_completed()


class SlowWire(GlooP2PWire):
    """See the module's docstring."""

    name = "gloo_p2p behind a slow card"

    def __init__(self, card: Card, group: dist.ProcessGroup, ranks: Sequence[int], **options: Any) -> None:
        super().__init__(group, ranks, **options)
        self._card = card

    def _slow(self, work: Work, nbytes: float, rounds: int = 1) -> Work:
        """nbytes: of the whole tensor; a rank sends all but its own part of it, each round."""
        return SlowWork(work, self._card.book(rounds * nbytes * (self.group_size - 1) / self.group_size))

    def all_gather(self, full: Tensor, shard: Tensor, label: Label) -> Work:
        return self._slow(super().all_gather(full, shard, label), full.nbytes)

    def reduce_scatter(self, shard: Tensor, full: Tensor, label: Label, divisor: float = 1.0) -> Work:
        return self._slow(super().reduce_scatter(shard, full, label, divisor), full.nbytes)

    def all_reduce(self, tensor: Tensor, label: Label, op: ReduceOp = "sum", divisor: float = 1.0) -> Work:
        return self._slow(super().all_reduce(tensor, label, op, divisor), tensor.nbytes, rounds=2)


@contextmanager
def behind(card: Card) -> Iterator[None]:
    """Models sharded in this block talk through ``card``."""

    def choose(choice: Any, *, group: Any, ranks: Any, ranks_per_host: Any = None, **rest: Any) -> WireSelection:
        return WireSelection(SlowWire(card, group, ranks, ranks_per_host=ranks_per_host), choice)

    with mock.patch.object(groups, "choose_wire", choose):
        yield
