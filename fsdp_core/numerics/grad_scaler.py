"""A gradient scaler whose overflow decision is the same on all ranks (paper section 4.4).

Each rank sees only its shard of the gradients, so an overflow on one rank alone would make ranks scale, step or
skip differently. The only addition to torch's scaler is one all-reduce of "found inf" before anybody acts on it;
a rank that holds no trainable element takes part in it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_core.comm.wire import Label, Wire

_LABEL = Label(-1, "norm", "found inf")


class AgreeingGradScaler(torch.amp.GradScaler):
    """torch's scaler, with ``wires`` over which "found inf" is agreed; none for a model on one rank."""

    def __init__(self, wires: Sequence[Wire], device: str, **settings: Any) -> None:
        super().__init__(device, **settings)
        self._wires = list(wires)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """torch's, then agreement. fp16 gradients may be unscaled: shards can be kept in fp16."""
        per_device: dict[Any, Tensor] = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        for wire in self._wires:
            together = torch.zeros(1, dtype=torch.float32, device=wire.device)
            for found in per_device.values():
                together = torch.maximum(together, found.to(wire.device).reshape(1))
            wire.all_reduce(together, _LABEL, "max").wait()
            if not per_device:
                per_device[found_inf.device] = found_inf
            for found in per_device.values():
                found.copy_(together.reshape(found.shape))
        return per_device
