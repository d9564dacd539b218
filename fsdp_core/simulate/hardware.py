"""The numbers a simulation needs of a machine. Every number that was fitted or measured says so where it is set
(``configs/hardware``); this file only says what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One kind of device, its host, and the network between hosts.

    half_flops_per_s, single_flops_per_s: peak of matrix products in 16-bit and in float32.
    compute_efficiency: share of the peak that the model's large matrix products reach.
    memory_bytes_per_s, memory_efficiency: device memory, and the share that elementwise kernels reach.
    usable_bytes: what the caching allocator may take in all.
    devices_per_host: ranks that share a host and its network card(s).
    intra_bytes_per_s: between devices of a host, per device and direction. cross_bytes_per_s: of one host's network,
        per direction, all cards together. Both with their efficiency.
    intra_reduce_ratio, cross_reduce_ratio: what collectives that add reach of the rate of those that copy.
    intra_step_s, cross_step_s: latency of one step of a ring inside a host, between hosts.
    launch_s: what issuing one operation costs the host. kernel_s: shortest kernel.
    overlap_slowdown: computing takes this much longer while a collective runs beside it.
    gathers_wait_in_forward: the part of a gather that forward cannot hide (a hypothesis). 1: it begins when computing
        has come to it; 0.5: half its time earlier; 0: as early as it can.
    """

    half_flops_per_s: float
    single_flops_per_s: float
    memory_bytes_per_s: float
    usable_bytes: int
    devices_per_host: int
    intra_bytes_per_s: float
    cross_bytes_per_s: float
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.85
    intra_efficiency: float = 0.77
    cross_efficiency: float = 0.7
    intra_reduce_ratio: float = 1.0
    cross_reduce_ratio: float = 1.0
    intra_step_s: float = 4e-6
    cross_step_s: float = 1e-5
    launch_s: float = 5e-6
    kernel_s: float = 3e-6
    overlap_slowdown: float = 0.0
    gathers_wait_in_forward: float = 0.0
