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
_ONLY_WRITE = frozenset(
    {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "normal_", "uniform_", "bernoulli_", "random_"}
)
"""Operations that do not read what they change."""


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
    is_half = (results or inputs)[0].dtype in _HALF
    return Cost(name, flops, _moved_bytes(func, args, kwargs, result), is_half, False, results)


def _moved_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Read and written. What is changed in place is both, also by operations over lists, which return nothing."""
    schema, name = func._schema, func.overloadpacket.__name__
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    moved = 0
    for argument in schema.arguments:
        nbytes = sum(_touched(tensor) for tensor in _tensors(given.get(argument.name)) if _is_plain(tensor))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name == "grads" and given.get("grad_scale") is None:
            is_written = False  # fused optimizers write gradients only where they unscale them
        is_read = not is_written or not (argument.is_out or name in _ONLY_WRITE)
        moved += nbytes * (is_written + is_read)
    parts = result if len(schema.returns) > 1 else [result]
    for returned, part in zip(schema.returns, parts, strict=False):
        if returned.alias_info is None:  # new, not one of the arguments
            moved += sum(_touched(tensor) for tensor in _tensors(part) if _is_plain(tensor))
    return moved


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
