"""What one operation costs: matrix-product FLOPs, bytes read and written. From shapes and dtypes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_HALF = (torch.float16, torch.bfloat16)
_NO_WORK = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "detach", "lift_fresh", "_unsafe_view"})
"""Operations that move nothing although they are no views in the schema's sense."""


@dataclass(frozen=True, slots=True)
class Cost:
    """flops: two per multiply-add. on_device: the results that live on the simulated device. is_view: no kernel."""

    name: str
    flops: float
    nbytes: int
    is_half: bool
    is_view: bool
    on_device: tuple[Tensor, ...]


def cost_of(func: Any, args: Any, kwargs: Any, result: Any) -> Cost:
    """Of one call of an aten operation on meta tensors."""
    results = tuple(tensor for tensor in _tensors(result) if _is_plain(tensor))
    name = func.overloadpacket.__name__
    inputs = [tensor for tensor in (*_tensors(args), *_tensors(list(kwargs.values()))) if _is_plain(tensor)]
    moves = bool(results) or (bool(inputs) and func._schema.is_mutable)  # in-place ones over lists return nothing
    if not moves or name in _NO_WORK or func.is_view:
        return Cost(name, 0.0, 0, False, True, results)
    count = flop_registry.get(func.overloadpacket)
    flops = float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
    nbytes = sum(_touched(tensor) for tensor in inputs) + sum(_touched(tensor) for tensor in results)
    is_half = (results or inputs)[0].dtype in _HALF
    return Cost(name, flops, nbytes, is_half, False, results)


def _is_plain(tensor: Tensor) -> bool:
    """On the simulated device, with a storage of its own; a sparse tensor is its indices and values, seen before."""
    return tensor.is_meta and tensor.layout == torch.strided


def _touched(tensor: Tensor) -> int:
    """Bytes of its elements; an expanded tensor is read once where it lies."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
