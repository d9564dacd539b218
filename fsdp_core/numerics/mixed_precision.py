"""Which dtype where: master copy, compute, reduction, buffers, inputs and outputs (paper section 4.4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.handle.flat_param_handle import HandleDtypes
from fsdp_core.policy import MixedPrecision

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_RUNNING_STATISTICS = {"running_mean", "running_var"}


def dtypes_for(parameter: Tensor, module: nn.Module, policy: MixedPrecision | None) -> HandleDtypes:
    """The three dtypes of one parameter.

    Integer and complex parameters are never cast. Batch norm computes with its own dtype: its kernels want
    weights and running statistics alike, and the statistics stay fp32.
    """
    own = parameter.dtype
    compute = own
    may_cast = own.is_floating_point and not isinstance(module, _BATCH_NORM)
    if policy is not None and policy.param_dtype is not None and may_cast:
        compute = policy.param_dtype
    reduce = compute
    if policy is not None and policy.reduce_dtype is not None and own.is_floating_point:
        reduce = policy.reduce_dtype
    return HandleDtypes(own, compute, reduce)


def cast_buffers(module: nn.Module, policy: MixedPrecision | None, device: torch.device, skip: set[nn.Module]) -> None:
    """Cast floating-point buffers once, and move all buffers to the compute device."""
    dtype = policy.buffer_dtype if policy is not None else None
    for owner in module.modules():
        if owner in skip:
            continue
        for name, buffer in owner._buffers.items():
            if buffer is None or (buffer.is_meta and device.type != "meta"):  # not built yet
                continue
            keeps_dtype = isinstance(owner, _BATCH_NORM) and name in _RUNNING_STATISTICS
            wanted = dtype if dtype is not None and buffer.is_floating_point() and not keeps_dtype else buffer.dtype
            if buffer.dtype != wanted or buffer.device != device:
                owner._buffers[name] = buffer.to(device=device, dtype=wanted)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with all floating-point tensors in ``dtype``; differentiable, the same object if nothing changes."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``function`` to the tensors in (nested) tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, function) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        items = [map_tensors(item, function) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if isinstance(value, dict):
        mapped = {key: map_tensors(item, function) for key, item in value.items()}
        if all(mapped[key] is value[key] for key in mapped):
            return value
        return type(value)(**mapped) if dataclasses.is_dataclass(value) else type(value)(mapped)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            new = map_tensors(old, function)
            if new is not old and field.init:
                changes[field.name] = new
        return dataclasses.replace(value, **changes) if changes else value
    return value
