"""What happens to a unit's gradients once they are complete: kept here, sent on their way, or handed to the caller.

Three cases, told apart by asking autograd what it will do with each parameter's accumulation node. ``backward``:
the reduction is started and nothing is returned; gradients appear at the end. ``backward`` inside ``no_sync``: the
unsharded sum is kept. ``torch.autograd.grad``: the reduction is waited for and the averaged shards are returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp_core.comm.memory import Buffer
from fsdp_core.errors import StateError
from fsdp_core.handle.flat_param_handle import FlatParamHandle
from fsdp_core.handle.sharded_tensor import ShardedTensor
from fsdp_core.numerics.reduction import Reduction, divisors_of, show
from fsdp_core.runtime.step_guard import sums_are_kept
from fsdp_core.trace.labels import labelled

if TYPE_CHECKING:
    from fsdp_core.runtime.context import Context
    from fsdp_core.runtime.unit import Unit

Gradients = tuple[Tensor | None, ...]
ByHandle = list[tuple[FlatParamHandle, dict[int, Tensor], list[int]]]
_will_execute = torch._C._will_engine_execute_node


def take_gradients(context: Context, unit: Unit, node: Any, grads: Gradients) -> Gradients:
    """The backward of a unit's node: ``grads`` are of its outputs, the result is for its sharded inputs."""
    if torch.is_grad_enabled():
        raise StateError(
            "Gradients of sharded parameters were asked for with create_graph=True.",
            unit=unit.name,
            remedy="take the graph of gradients with respect to inputs only; inside "
            "`with fsdp_core.full_parameters(model):` the model is a plain one, whose gradients stay there",
        )
    wanted = [_wants(edge[0]) for edge in node.next_functions[: len(grads)]]
    if any(one == "captured" for one in wanted):
        return _reduce_for_caller(context, unit, node, unit.grads_by_handle(node.positions, grads))
    positions: Sequence[int] = node.positions
    if not all(one == "accumulate" for one in wanted):  # backward(inputs=...) names only some
        pairs = [(p, g) for p, g, one in zip(positions, grads, wanted, strict=True) if one == "accumulate"]
        positions, kept = [p for p, _ in pairs], [g for _, g in pairs]
    else:
        kept = list(grads)
    taking = {id(handle): (present, active) for handle, present, active in unit.grads_by_handle(positions, kept)}
    for handle, _, _ in unit.grads_by_handle(node.positions, grads):  # every handle reduces, on every rank
        present, active = taking.get(id(handle), ({}, []))
        if context.sync_gradients:
            start_reduction(context, unit, handle, present, active, node=node)
        else:
            _add_unsynced(context, unit, handle, present, active)
    return (None,) * len(grads)


def collect_now(context: Context, handle: FlatParamHandle, index: int, node: Any, position: int, grad: Tensor) -> bool:
    """Copy one complete gradient into its unit's source ahead of the others; false if it has to wait for them.

    Nothing is waited for, so that the order of collectives is what it would be without this.
    """
    if torch.is_grad_enabled() or not context.sync_gradients or handle.unsynced is not None:
        return False
    accumulate_node, _ = node.next_functions[node.positions.index(position)]
    return _wants(accumulate_node) == "accumulate" and handle.sources.collect(node, index, grad)


def _wants(accumulate_node: Any) -> str:
    """What this backward does with a parameter's gradient: accumulate it, hand it to the caller, or neither."""
    try:
        return "accumulate" if _will_execute(accumulate_node) else "no"
    except RuntimeError:  # the node is a leaf that torch.autograd.grad captures
        return "captured"


def divide_factor(context: Context, unit: Unit) -> float:
    return float(unit.groups.world_size) if context.divide_factor is None else context.divide_factor


def start_reduction(
    context: Context,
    unit: Unit,
    handle: FlatParamHandle,
    present: dict[int, Tensor],
    active: Iterable[int],
    phase: str = "",
    node: Any = None,
) -> None:
    """Fill a source (on top of what was summed without communication) and send it on its way."""
    with labelled("reduce", unit.name):
        active = list(active)
        context.tell("reduce", unit, phase)  # beginning with the wait for earlier ones
        handle.gradient.markers.check_whole(unit.name)
        if handle.unsynced is None:
            context.reducer.make_room()
            source = handle.sources.collected(node, present)
        else:
            _clear_forgotten(unit, handle, handle.unsynced)
            source, handle.unsynced = handle.unsynced, None
            active = sorted({*active, *handle.gradient.markers.indices})
            context.reducer.note_addition(handle, active)
            handle.sources.fill(source, present, add=True)
            handle.gradient.markers.drop()
            context.reducer.make_room()
        context.record("reduce", unit, phase, "reduce", source.tensor.nbytes)
        reduction = Reduction(handle, source, active, unit.reduce_label, divide_factor(context, unit))
        context.reducer.start(reduction)


def flush_unsynced(context: Context) -> None:
    """Sums of units that earlier micro-batches used and the synchronised one did not."""
    for unit, handle in context.each_handle():
        if handle.unsynced is not None:
            start_reduction(context, unit, handle, {}, [], "flush")


def show_gradients(context: Context, finished: Sequence[Reduction]) -> None:
    """At the end of a backward: its gradients become visible, and the user's hooks are called, once per parameter."""
    for _, handle in context.each_handle():
        handle.gradient.note_strays()
    noted = [(unit, handle) for unit, handle in context.each_handle() if handle.gradient.outside]
    outside = [(unit, handle, list(handle.gradient.outside)) for unit, handle in noted]
    try:
        for unit, handle, _ in outside:
            _add_outside(unit, handle)
        show(finished)
    finally:
        for _, handle, _ in outside:
            handle.gradient.outside.clear()
    if outside and context.sync_gradients:
        shown = {(id(reduction.handle), index) for reduction in finished for index in reduction.active}
        for _, handle, indices in outside:
            only = [index for index in indices if (id(handle), index) not in shown]
            handle.gradient.run_post_accumulate_hooks(only)


def _add_outside(unit: Unit, handle: FlatParamHandle) -> None:
    """Gradients past the unit's node join those that are shown, and do not touch sums that are kept."""
    gradient, markers = handle.gradient, handle.gradient.markers
    if not gradient.outside or gradient.is_staged:  # staged: they join when it is shown
        return
    if handle.unsynced is None:
        gradient.add_outside()
        return
    _clear_forgotten(unit, handle, handle.unsynced)
    kept = [index for index in markers.indices if not markers.is_cleared(index)]
    gradient.add_outside()
    markers.drop()
    if kept:
        markers.set(kept)
    else:
        handle.sources.release(handle.unsynced)
        handle.unsynced = None


def _add_unsynced(
    context: Context, unit: Unit, handle: FlatParamHandle, present: dict[int, Tensor], active: list[int]
) -> None:
    """Keep the sum of micro-batches here, unsharded, in the reduce dtype; nothing is sent."""
    handle.gradient.markers.check_whole(unit.name)
    if handle.unsynced is None:
        handle.unsynced = handle.sources.acquire()
        handle.sources.fill(handle.unsynced, present, add=False)
    else:
        _clear_forgotten(unit, handle, handle.unsynced)
        handle.sources.fill(handle.unsynced, present, add=True)
    handle.gradient.markers.set(active)
    context.reducer.note_addition(handle, active)
    sums_are_kept(context)
    context.record("accumulate", unit, "", "reduce")


def _clear_forgotten(unit: Unit, handle: FlatParamHandle, source: Buffer) -> None:
    """Sums whose marker was cleared by zero_grad must not come back."""
    handle.gradient.markers.check(unit.name)
    for index in handle.gradient.markers.indices:
        if handle.gradient.markers.is_cleared(index):
            start, end = handle.segment_range(index)
            source.tensor[start:end].zero_()


def _reduce_for_caller(context: Context, unit: Unit, node: Any, by_handle: ByHandle) -> Gradients:
    """torch.autograd.grad over sharded parameters: wait, and return the averaged shards."""
    results: dict[int, Tensor] = {}
    for handle, present, indices in by_handle:
        context.tell("reduce", unit)
        context.record("reduce", unit, "", "reduce", handle.layout.padded_numel * handle.dtypes.reduce.itemsize)
        shard = _reduce_now(context, unit, handle, present)
        for index in indices:
            parameter = handle.params[index]
            span = parameter.spec.span
            part: Tensor = ShardedTensor(shard[span.shard_start : span.shard_end], parameter.spec)
            for hook in list((parameter.__dict__.get("grad_hooks") or {}).values()):
                changed = hook(part)
                part = part if changed is None else changed
            results[unit.position_of(parameter)] = part
    return tuple(results.get(position) for position in node.positions)


def _reduce_now(context: Context, unit: Unit, handle: FlatParamHandle, present: dict[int, Tensor]) -> Tensor:
    """One averaged shard, on the shards' device and in their dtype."""
    source = handle.sources.acquire()
    handle.sources.fill(source, present, add=False)
    divisors = divisors_of(handle, divide_factor(context, unit))
    if divisors.source != 1:
        source.tensor.div_(divisors.source)
    shard = torch.empty(handle.layout.shard_numel, dtype=handle.dtypes.reduce, device=source.tensor.device)
    handle.wire.reduce_scatter(shard, source.tensor, unit.reduce_label, divisors.scatter).wait()
    handle.replicate_wire.all_reduce(shard, unit.reduce_label, "sum", divisors.replicate).wait()
    handle.sources.release(source)
    return shard.to(device=handle.sharded.device, dtype=handle.dtypes.param)
