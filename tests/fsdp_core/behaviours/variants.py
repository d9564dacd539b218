"""The neighbours every behaviour is tried with: F, RAF/NRAF, where buffers come from, which wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_core import MixedPrecision, RateLimit

VARIANTS: dict[str, dict[str, Any]] = {
    "raf": {"wire": "collectives"},
    "nraf": {"wire": "collectives", "reshard_after_forward": False},
    "f1": {"wire": "collectives", "sharding_factor": 1},
    "allocator": {"wire": "collectives", "gather_buffers": "allocator"},
    "default": {},
}
NEIGHBOURS: dict[str, dict[str, Any]] = {  # in the longer suite
    "p2p": {"wire": "gloo_p2p"},
    "tight": {"wire": "collectives", "rate_limit": RateLimit(1), "forward_prefetch": True},
}
# Every cast takes place, and no digit is lost: what is compared are still exact results.
_WIDE = MixedPrecision(torch.float64, torch.float64, output_dtype=torch.float32)
WIDE = {"wire": "collectives", "mixed_precision": _WIDE}
TWO = {name: VARIANTS[name] for name in ("raf", "default")}


def every_variant(function: Callable[..., None]) -> Callable[..., None]:
    more = [pytest.param(options, id=name, marks=pytest.mark.full) for name, options in NEIGHBOURS.items()]
    shown = [pytest.param(options, id=name) for name, options in VARIANTS.items()]
    return pytest.mark.parametrize("options", [*shown, *more])(function)


def two_variants(function: Callable[..., None]) -> Callable[..., None]:
    """For behaviours that the other settings do not touch."""
    return pytest.mark.parametrize("options", TWO.values(), ids=TWO.keys())(function)


def message_of(function: Callable[[], Any], kind: type[BaseException]) -> str:
    """The text of the error that ``function`` must raise, on every rank."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


class Tower(nn.Module):
    """Three named layers; the inner one is the usual unit."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.inner = nn.Sequential(nn.Linear(width, width + 1), nn.Tanh(), nn.Linear(width + 1, width))
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.inner(torch.tanh(self.first(x)))))
