"""Frozen user choices. Nothing here knows about processes, streams or storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

GatherBuffers = Literal["pooled", "allocator"]
WireChoice = Literal["auto", "collectives", "gloo_p2p", "shared_memory"]


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of one run (paper section 4.4). ``None`` leaves the parameter's own dtype.

    param_dtype: forward and backward compute, and the all-gather.
    reduce_dtype: gradient reduction and sums of unsynchronised micro-batches; ``None`` follows ``param_dtype``.
    buffer_dtype: floating-point buffers (integer buffers keep theirs; running statistics stay fp32).
    cast_forward_inputs: cast floating-point inputs of each unit's forward to ``param_dtype``.
    output_dtype: cast the root's floating-point outputs; ``None`` leaves them.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    output_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"MixedPrecision.{name} must be a floating-point torch.dtype or None, got {dtype!r}")


@dataclass(frozen=True)
class RateLimit:
    """Cap on gathers in flight (paper section 3.4; ``in flight`` counts the unit being computed).

    kind: ``fixed`` keeps ``max_inflight``; ``unlimited`` never waits; ``adaptive`` moves between 1 and
    ``max_inflight_ceiling`` from allocator statistics, the same decision on all ranks.
    """

    max_inflight: int = 2
    kind: Literal["fixed", "unlimited", "adaptive"] = "fixed"
    max_inflight_ceiling: int = 8

    def __post_init__(self) -> None:
        if self.kind not in ("fixed", "unlimited", "adaptive"):
            raise ValueError(f"RateLimit.kind must be 'fixed', 'unlimited' or 'adaptive', got {self.kind!r}")
        if not isinstance(self.max_inflight, int) or self.max_inflight < 1:
            raise ValueError(f"RateLimit.max_inflight must be an integer of at least 1, got {self.max_inflight!r}")
