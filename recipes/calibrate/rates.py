"""What one device does alone: matrix products by dtype, memory, the shortest operation. All ranks at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from recipes.calibrate.stopwatch import Stopwatch

DTYPES = ("float32", "bfloat16", "float16")
_SIDES = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}  # of square matrices
_COPIES = {"cpu": (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26), "cuda": (1 << 26, 1 << 28, 1 << 30)}  # bytes
_TINY_CALLS = 1000
_SLEEP_CYCLES = 20_000_000  # of a GPU's clock: about 10 ms, in which the host issues far ahead


@dataclass(frozen=True)
class Memory:
    """bytes_per_s: of a copy, at the size where it is fastest; read and written bytes count.
    efficiency: part of it that an elementwise operation with a new result reaches, with ``elementwise_bytes`` a tensor.
    """

    bytes_per_s: float
    efficiency: float
    elementwise_bytes: int


def matrix_rate(watch: Stopwatch, dtype: torch.dtype) -> float | None:
    """FLOP/s at the best size; None where the device has no such product. Collective."""
    device, best = watch.ranks.device, 0.0
    for side in _SIDES[device.type]:
        try:
            a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            seconds = watch.seconds(partial(torch.mm, a, b, out=out))
        except RuntimeError:  # the same on every rank: they have the same torch and the same kind of device
            return None
        best = max(best, 2.0 * side**3 / seconds)
        if 8 * seconds > watch.budget_s:  # the next side takes eight times as long
            break
    return best


def memory_rate(watch: Stopwatch, elementwise_bytes: int) -> Memory:
    """elementwise_bytes: of one tensor in the model's forward. Collective."""
    device, best = watch.ranks.device, 0.0
    for nbytes in _COPIES[device.type]:
        source = torch.ones(nbytes // 4, device=device)
        target = torch.empty_like(source)
        seconds = watch.seconds(partial(target.copy_, source))
        best = max(best, 2.0 * nbytes / seconds)
    a, b = (torch.ones(max(1, elementwise_bytes // 4), device=device) for _ in range(2))
    rate = 3.0 * a.nbytes / watch.seconds(lambda: a * b)
    return Memory(best, min(1.0, rate / best), a.nbytes)


def issue_s(watch: Stopwatch) -> float:
    """Host time of one operation that has next to nothing to do. Collective."""
    one = torch.ones(1, device=watch.ranks.device)
    return watch.host_seconds(lambda: one.add_(1), _TINY_CALLS)


def kernel_s(watch: Stopwatch, issuing_s: float) -> float:
    """The shortest operation on the device; on CPU there is no other than the host's. Collective."""
    device = watch.ranks.device
    if device.type != "cuda":
        return issuing_s
    one = torch.ones(1, device=device)
    return watch.mean(_behind_a_sleep(one))


def _behind_a_sleep(one: Tensor) -> float:
    """Tiny kernels that are all queued before the first one runs: the host is not waited for."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_SLEEP_CYCLES)
    begin.record()
    for _ in range(_TINY_CALLS):
        one.add_(1)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / _TINY_CALLS
