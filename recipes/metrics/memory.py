"""Peak memory of this rank: torch's caching allocator on CUDA, resident size on CPU."""

from __future__ import annotations

import abc
import resource
import sys
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


class MemoryMeter(abc.ABC):
    """``read()`` gives bytes by name since the last ``read()``; every value may be combined over ranks by max."""

    @abc.abstractmethod
    def read(self) -> dict[str, int]: ...


class ResidentMemory(MemoryMeter):
    """CPU: ``rss_bytes`` now and ``peak_rss_bytes`` of the process so far (both count shared pages)."""

    def read(self) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_bytes = peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
        now = peak_bytes
        if _STATM.exists():
            now = int(_STATM.read_text().split()[1]) * resource.getpagesize()
        return {"rss_bytes": now, "peak_rss_bytes": max(now, peak_bytes)}


class CudaMemory(MemoryMeter):
    """CUDA: peaks since the last read as ``torch.cuda.memory_stats`` has them, and alloc retries so far.

    active counts blocks that the device may still be using though the host has freed them; reserved is what
    the allocator holds from the driver. A retry means it ran out, gave its cache back and tried again, with
    the device standing still.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> dict[str, int]:
        stats = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return {
            "peak_allocated_bytes": stats.get("allocated_bytes.all.peak", 0),
            "peak_active_bytes": stats.get("active_bytes.all.peak", 0),
            "peak_reserved_bytes": stats.get("reserved_bytes.all.peak", 0),
            "num_alloc_retries": stats.get("num_alloc_retries", 0),
        }


def memory_meter(device: torch.device) -> MemoryMeter:
    return CudaMemory(device) if device.type == "cuda" else ResidentMemory()


def retry_hint(before: int, now: int, max_inflight: int, limiter: str) -> str | None:
    """A line for people when allocator retries appear; None when there are no new ones."""
    if now <= before:
        return None
    if limiter == "unlimited":
        remedy = "rate_limiter=fixed bounds how many gathered units are alive at once"
    elif max_inflight > 2:
        remedy = f"lower rate_limiter.max_inflight (now {max_inflight})"
    else:
        remedy = (
            "try sharding.gather_buffers=pooled, a smaller train.micro_batch or train.activation_checkpointing=true"
        )
    return (
        f"{now - before} allocator retries since the last line: GPU memory ran out and was reclaimed while the GPU "
        f"waited, which costs speed; {remedy}"
    )
