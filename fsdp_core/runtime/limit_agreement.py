"""The adaptive limit at work: samples the allocator, agrees over all ranks, moves the limiter."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsdp_core.comm.wire import Label, Wire
from fsdp_core.runtime.adaptive_limit import AdaptiveLimit, Decision, MemorySample, Pressure, pressure_between
from fsdp_core.runtime.rate_limiter import RateLimiter

_LABEL = Label(-1, "limit", "adaptive rate limit")


def cuda_sample(device: torch.device) -> MemorySample:
    """The caching allocator's numbers; no synchronisation."""
    stats = torch.cuda.memory_stats(device)
    return MemorySample(
        stats.get("num_alloc_retries", 0),
        stats.get("allocated_bytes.all.peak", 0),
        stats.get("reserved_bytes.all.peak", 0),
        torch.cuda.get_device_properties(device).total_memory,
    )


class LimitAgreement:
    """Called at the end of every synchronised backward, by all ranks.

    The ranks' numbers are agreed on the step after they were taken, so that nobody waits for the device.
    """

    def __init__(self, limiter: RateLimiter, wire: Wire, sample: Callable[[], MemorySample] | None) -> None:
        self._limiter, self._wire, self._sample = limiter, wire, sample
        limit = limiter.limit
        self.adaptive = AdaptiveLimit(limit.max_inflight, limit.max_inflight_ceiling)
        self._previous: MemorySample | None = None
        self._shared: torch.Tensor | None = None

    def load(self, state: dict[str, int]) -> None:
        """Continue from a saved ``AdaptiveLimit``; what the allocator said before this process began is gone."""
        self.adaptive.load_state_dict(state)
        self._limiter.max_inflight = self.adaptive.limit

    def step(self) -> Decision | None:
        """The change of the limit that the ranks have agreed on, if there is one."""
        if self._sample is None:  # no allocator statistics on this device: the limit stays
            return None
        num_decisions = len(self.adaptive.decisions)
        if self._shared is not None:
            new_retries, reserved, idle = (int(value) for value in self._shared.tolist())
            self._limiter.max_inflight = self.adaptive.observe(Pressure(new_retries, reserved, idle))
        sample = self._sample()
        pressure = pressure_between(self._previous, sample)
        self._previous = sample
        numbers = [pressure.new_retries, pressure.reserved_permille, pressure.idle_permille]
        self._shared = torch.tensor(numbers, dtype=torch.int64, device=self._wire.device)
        self._wire.all_reduce(self._shared, _LABEL, "max").wait()
        return self.adaptive.decisions[-1] if len(self.adaptive.decisions) > num_decisions else None
