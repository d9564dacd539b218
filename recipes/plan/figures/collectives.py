"""Figures of one collective alone: what an all-gather takes on a profile. Rings by alpha and beta."""

from __future__ import annotations

from fsdp_core.simulate.hardware import Hardware
from fsdp_core.simulate.network import collective_s
from recipes.plan.figures.points import Gathers

_FLOAT32 = 4  # bytes


def all_gathers_ms(gathers: Gathers, num_ranks: int, hardware: Hardware) -> float:
    """Milliseconds for all calls, one after the other, over the first ``num_ranks`` ranks.

    A list as output costs a copy from the one buffer that was gathered into: everything is read and written once more.
    """
    nbytes = _FLOAT32 * gathers.total_numel // gathers.num_calls
    one = collective_s("all_gather", nbytes, tuple(range(num_ranks)), hardware)
    if gathers.is_list:
        one += 2 * nbytes / (hardware.memory_bytes_per_s * hardware.memory_efficiency)
    return 1e3 * gathers.num_calls * one
