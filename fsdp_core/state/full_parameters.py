"""Whole parameters for a while: gathered in full precision, seen as ordinary parameters, written back if wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from fsdp_core.comm.wire import Label
from fsdp_core.errors import StateError
from fsdp_core.handle.flat_param_handle import FlatParamHandle
from fsdp_core.handle.sharded_tensor import ShardedTensor
from fsdp_core.runtime.context import Context
from fsdp_core.runtime.unit import Unit


def gather_flat(handle: FlatParamHandle, shard: Tensor, label: Label) -> Tensor:
    """[padded_numel] of ``shard``'s dtype on the compute device, from all ranks of the sharding group."""
    shard = shard.detach().to(handle.wire.device)
    full = torch.empty(handle.layout.padded_numel, dtype=shard.dtype, device=shard.device)
    handle.wire.all_gather(full, shard.contiguous(), label).wait()
    return full


def whole_views(handle: FlatParamHandle, flat: Tensor) -> list[Tensor]:
    """Original shapes and strides over a gathered flat tensor."""
    return [flat.as_strided(s.shape, s.stride, s.start) for s in handle.layout.segments]


def shard_of_grads(handle: FlatParamHandle) -> Tensor | None:
    """This rank's gradient as one [shard_numel] tensor, ``None`` if no parameter has one."""
    flat = handle.flat_parameter
    if flat is not None:
        return flat.grad
    grads = [parameter.grad for parameter in handle.params]
    if all(grad is None for grad in grads):
        return None
    shard = torch.zeros_like(handle.sharded)
    for parameter, grad in zip(handle.params, grads, strict=True):
        if isinstance(grad, ShardedTensor):
            span = parameter.spec.span
            shard[span.shard_start : span.shard_end].copy_(grad.local)
    return shard


@contextmanager
def full_parameters_of(
    contexts: Sequence[Context],
    *,
    writeback: bool,
    with_grads: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
) -> Iterator[None]:
    """See ``fsdp_core.full_parameters``."""
    if writeback and rank0_only:
        raise StateError(
            "writeback needs the full parameters on every rank.",
            expected="writeback=False together with rank0_only=True",
            got="writeback=True, rank0_only=True",
        )
    shown: list[tuple[Unit, FlatParamHandle, list[nn.Parameter]]] = []
    for context in contexts:
        if context.current.num_open:
            raise StateError(
                "Full parameters were asked for while a forward is running.",
                unit=context.root.name,
                remedy="use full_parameters outside of forward",
            )
        context.settle()
        for unit, handle in context.each_handle():
            flat = gather_flat(handle, handle.sharded, unit.state_label)
            grads = shard_of_grads(handle) if with_grads else None
            grad_flat = None if grads is None else gather_flat(handle, grads, unit.state_label)
            if rank0_only and unit.groups.rank != unit.groups.table.rows[0][0]:
                continue
            if offload_to_cpu:
                flat = flat.cpu()
                grad_flat = None if grad_flat is None else grad_flat.cpu()
            shown.append((unit, handle, _show(handle, flat, grad_flat)))
    for context in contexts:
        context.settle()  # peers have read this rank's shards: they may be written again
    for context in contexts:
        context.shows_full = bool(shown)
    try:
        yield
    finally:
        for context in contexts:
            context.shows_full = False
        for _, handle, parameters in shown:
            _hide(handle)
            if writeback:
                for index, parameter in enumerate(parameters):
                    handle.write_original(index, parameter.data)


def _show(handle: FlatParamHandle, flat: Tensor, grad_flat: Tensor | None) -> list[nn.Parameter]:
    views = whole_views(handle, flat)
    grads = whole_views(handle, grad_flat) if grad_flat is not None else None
    parameters = []
    for index, (view, places) in enumerate(zip(views, handle.places, strict=True)):
        parameter = nn.Parameter(view, requires_grad=handle.params[index].requires_grad)
        if grads is not None and handle.params[index].grad is not None:
            parameter.grad = grads[index]
        for place in places:
            place.module._parameters[place.name] = parameter
        parameters.append(parameter)
    return parameters


def _hide(handle: FlatParamHandle) -> None:
    for parameter, places in zip(handle.params, handle.places, strict=True):
        for place in places:
            place.module._parameters[place.name] = cast(nn.Parameter, parameter)
