"""From a hardware profile to the numbers that a simulation needs, and what of them is only assumed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from fsdp_core.simulate.hardware import Hardware
from recipes.schema.derived import unknown_to_plan
from recipes.schema.training import HardwareConfig

USABLE_SHARE = 0.94  # of a device's memory: the rest goes to the context and NCCL's buffers (A100: 80 of 85.2 GB)
_FITTED = (
    "compute_efficiency",
    "memory_efficiency",
    "intra_efficiency",
    "cross_efficiency",
    "intra_reduce_ratio",
    "cross_reduce_ratio",
    "intra_step_s",
    "cross_step_s",
    "launch_s",
    "kernel_s",
    "overlap_slowdown",
    "gathers_wait_in_forward",
)

_NO_END = 1 << 62  # bytes
_SOME_DEVICE: dict[str, Any] = {
    "peak_flops_float32": 20e12,
    "peak_flops_bfloat16": 300e12,
    "memory_bytes": _NO_END,
    "memory_bytes_per_s": 2e12,
    "intra_host_bytes_per_s": 300e9,
    "cross_host_bytes_per_s": 100e9,
}


@dataclass(frozen=True)
class Machine:
    """hardware: for the simulation. assumed: keys of the profile that are null, where a default stands in."""

    name: str
    hardware: Hardware
    assumed: tuple[str, ...]


def machine_of(profile: HardwareConfig, ranks_per_host: int, world_size: int | None = None) -> Machine:
    """world_size: what the plan is of; links that it does not use need not be known. None: all have to be.

    Raises ValueError, naming the keys, for a profile that knows too little.
    """
    if unknown := unknown_to_plan(profile, world_size, ranks_per_host):
        raise ValueError(f"the hardware profile '{profile.name}' does not know {', '.join(unknown)}")
    return _machine(profile, ranks_per_host)


def machine_for_memory(profile: HardwareConfig, ranks_per_host: int) -> Machine:
    """For questions of memory alone. Rates that the profile does not know are those of some device: they put events
    in an order, and no time that follows from them may be told. Unknown memory has no end."""
    known = {name: value for name, value in dataclasses.asdict(profile).items() if value is not None}
    if "memory_bytes" not in known and "usable_memory_bytes" not in known:
        known["usable_memory_bytes"] = _NO_END
    return _machine(HardwareConfig(**(_SOME_DEVICE | known)), ranks_per_host)


def _machine(profile: HardwareConfig, ranks_per_host: int) -> Machine:
    """Links that are not known cost nothing: nobody uses them."""
    assert profile.peak_flops_float32 and profile.memory_bytes and profile.memory_bytes_per_s
    half = profile.peak_flops_bfloat16 or profile.peak_flops_float16 or profile.peak_flops_float32
    fitted = {name: getattr(profile, name) for name in _FITTED}
    hardware = Hardware(
        half_flops_per_s=half,
        single_flops_per_s=profile.peak_flops_float32,
        memory_bytes_per_s=profile.memory_bytes_per_s,
        usable_bytes=profile.usable_memory_bytes or int(USABLE_SHARE * profile.memory_bytes),
        devices_per_host=ranks_per_host,
        intra_bytes_per_s=profile.intra_host_bytes_per_s or math.inf,
        cross_bytes_per_s=profile.cross_host_bytes_per_s or math.inf,
        **{name: value for name, value in fitted.items() if value is not None},
    )
    return Machine(profile.name, hardware, tuple(name for name, value in fitted.items() if value is None))
