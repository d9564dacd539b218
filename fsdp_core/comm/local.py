"""The wire of a group of one: nothing is sent, values are only copied (or converted) where they must move."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_core.comm.wire import DoneWork, Label, ReduceOp, Wire, WireCounter, Work

_DONE = DoneWork()


class LocalWire(Wire):
    """F = 1. ``full_view`` is the shard itself, so that unsharded parameters cost no second copy."""

    name = "local"
    group_size = 1
    group_rank = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.counter = WireCounter()

    @property
    def device(self) -> torch.device:
        return self._device

    def all_gather(self, full: Tensor, shard: Tensor, label: Label) -> Work:
        if full.data_ptr() != shard.data_ptr() or full.dtype != shard.dtype:
            full.copy_(shard)
        return _DONE

    def reduce_scatter(self, shard: Tensor, full: Tensor, label: Label, divisor: float = 1.0) -> Work:
        if full.data_ptr() != shard.data_ptr():
            shard.copy_(full)
        if divisor != 1:
            shard.div_(divisor)
        return _DONE

    def all_reduce(self, tensor: Tensor, label: Label, op: ReduceOp = "sum", divisor: float = 1.0) -> Work:
        if divisor != 1:
            tensor.div_(divisor)
        return _DONE

    def broadcast(self, tensor: Tensor, src: int, label: Label) -> Work:
        return _DONE

    def full_view(self, shard: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
        return shard if dtype is None or dtype == shard.dtype else None

    def close(self) -> None:
        return None
