"""What operations cost, by hand: n elements read and written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_core.simulate.cost import Cost, cost_of
from fsdp_core.simulate.cuda_kernels import CudaKernels

N = 1000


class Costs(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Cost] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        cost = cost_of(func, args, kwargs or {}, result)
        if not cost.is_view:
            self.seen.append(cost)
        return result


def costs(work: Callable[[], object]) -> list[Cost]:
    with Costs() as mode:
        work()
    return mode.seen


def vector(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(N, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("work", "accesses"),
    [
        (lambda a, b, c: a + b, 3),
        (lambda a, b, c: a.add_(b), 3),
        (lambda a, b, c: a.mul_(2), 2),
        (lambda a, b, c: a.copy_(b), 2),
        (lambda a, b, c: a.zero_(), 1),
        (lambda a, b, c: torch.add(a, b, out=c), 3),
        (lambda a, b, c: a.addcdiv_(b, c), 4),
        (lambda a, b, c: torch._foreach_mul_([a, b], 2), 4),
        (lambda a, b, c: torch._foreach_copy_([a], [b]), 2),
        (lambda a, b, c: torch._foreach_norm([a, b]), 2),
    ],
)
def test_accesses_of_each_element(work: Callable[..., object], accesses: int) -> None:
    """Of one scale and of a norm's result nothing is said: a few bytes."""
    (cost,) = costs(lambda: work(vector(), vector(), vector()))
    assert cost.nbytes == pytest.approx(4 * N * accesses, abs=16)
    assert cost.flops == 0


def test_a_matrix_product() -> None:
    a, b = torch.empty(2, 3, device="meta"), torch.empty(3, 5, device="meta")
    (cost,) = costs(lambda: a @ b)
    assert (cost.flops, cost.nbytes, cost.is_half) == (2 * 2 * 3 * 5, 4 * (6 + 15 + 10), False)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_fused_adam_reads_four_tensors_and_writes_three(dtype: torch.dtype, size: int) -> None:
    weight = torch.nn.Parameter(vector(dtype))
    weight.grad = vector(dtype)
    with CudaKernels():
        optimizer = torch.optim.AdamW([weight], fused=True)
        optimizer.step()  # makes the state
        (cost,) = [one for one in costs(optimizer.step) if one.name == "_fused_adamw_"]
    assert cost.nbytes == pytest.approx(7 * size * N, abs=16)


def test_an_adam_of_single_operations_moves_19_elements_for_each_parameter() -> None:
    """lerp_ 3, mul_ 2, addcmul_ 4, sqrt 2, div 2, add_ 2, addcdiv_ 4."""
    weight = torch.nn.Parameter(vector())
    weight.grad = vector()
    optimizer = torch.optim.AdamW([weight], foreach=False, weight_decay=0.0)
    optimizer.step()
    on_device = [one for one in costs(optimizer.step) if one.nbytes >= 4 * N]
    assert sum(one.nbytes for one in on_device) == pytest.approx(4 * 19 * N, abs=64)
