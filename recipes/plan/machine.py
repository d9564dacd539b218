"""From a hardware profile to the numbers that a simulation needs, and what of them is only assumed."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_core.simulate.hardware import Hardware
from recipes.schema.derived import unknown_to_plan
from recipes.schema.training import HardwareConfig

USABLE_SHARE = 0.94  # of a device's memory: the rest goes to the context and NCCL's buffers (A100: 80 of 85.2 GB)
_FITTED = (
    "compute_efficiency",
    "memory_efficiency",
    "intra_efficiency",
    "cross_efficiency",
    "intra_step_s",
    "cross_step_s",
    "launch_s",
    "kernel_s",
    "overlap_slowdown",
    "gathers_wait_in_forward",
    "alloc_retry_s",
)


@dataclass(frozen=True)
class Machine:
    """hardware: for the simulation. assumed: keys of the profile that are null, where a default stands in."""

    name: str
    hardware: Hardware
    assumed: tuple[str, ...]


def machine_of(profile: HardwareConfig, ranks_per_host: int) -> Machine:
    """Raises ValueError, naming the keys, for a profile that knows too little."""
    if unknown := unknown_to_plan(profile):
        raise ValueError(f"the hardware profile '{profile.name}' does not know {', '.join(unknown)}")
    assert profile.peak_flops_float32 and profile.memory_bytes and profile.memory_bytes_per_s
    assert profile.intra_host_bytes_per_s and profile.cross_host_bytes_per_s
    half = profile.peak_flops_bfloat16 or profile.peak_flops_float16 or profile.peak_flops_float32
    fitted = {name: getattr(profile, name) for name in _FITTED}
    hardware = Hardware(
        half_flops_per_s=half,
        single_flops_per_s=profile.peak_flops_float32,
        memory_bytes_per_s=profile.memory_bytes_per_s,
        usable_bytes=profile.usable_memory_bytes or int(USABLE_SHARE * profile.memory_bytes),
        devices_per_host=ranks_per_host,
        intra_bytes_per_s=profile.intra_host_bytes_per_s,
        cross_bytes_per_s=profile.cross_host_bytes_per_s,
        **{name: value for name, value in fitted.items() if value is not None},
    )
    return Machine(profile.name, hardware, tuple(name for name, value in fitted.items() if value is None))
