"""From a plan to running units: groups, agreement between ranks, shards, parameters, hooks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fsdp_core.comm.groups import Groups, build_groups, streams_of
from fsdp_core.comm.memory import BufferPool
from fsdp_core.comm.wire import Label
from fsdp_core.errors import WrapError
from fsdp_core.handle.flat_param_handle import FlatParamHandle, HandleDtypes, Place, Resources
from fsdp_core.handle.sharded_tensor import ShardedTensor, ShardSpec, flat_in_memory_order
from fsdp_core.init import is_deferred, materialize_rest, stream_unit, user_attributes
from fsdp_core.layout.flat_layout import LocalSpan, ParameterShape, build_layout, dense_stride
from fsdp_core.numerics.mixed_precision import cast_buffers, dtypes_for
from fsdp_core.runtime.agreement import check_options, check_structure, check_values
from fsdp_core.runtime.context import Context
from fsdp_core.runtime.hooks import attach
from fsdp_core.runtime.names import walk
from fsdp_core.runtime.options import ShardingOptions, resolve_device
from fsdp_core.runtime.parameter_table import ParameterTable
from fsdp_core.runtime.plan_units import Plan, PlannedParameter, PlannedUnit, plan_units
from fsdp_core.runtime.rate_limiter import RateLimiter
from fsdp_core.runtime.recurrent import follow_unit
from fsdp_core.runtime.unit import Unit


def build(root: nn.Module, options: ShardingOptions) -> Context:
    """Shard ``root`` in place; every rank of the group calls this with an equal model."""
    plan = plan_units(root, options)
    device = resolve_device(options.device)
    check_options(options, device)
    groups = build_groups(
        process_group=options.process_group,
        mesh=options.mesh,
        sharding_factor=options.sharding_factor,
        wire=options.wire,
        device=device,
        ranks_per_host=options.ranks_per_host,
        expected_bytes=_shared_bytes(plan, options),
        gradient_bytes=sum(p.tensor.nbytes for unit in plan.units for p in unit.parameters)
        // (options.sharding_factor or 1),
    )
    check_structure(plan, groups)
    materialize_rest(root, (p.tensor for planned in plan.units for p in planned.parameters), device)
    if options.sync_module_states:
        broadcast_states(root, plan, groups, device)
    else:
        check_values(root, plan, groups)
    _drop_derived_tensors(root)
    cast_buffers(root, options.mixed_precision, device, plan.ignored)
    streams = streams_of(options.process_group, device)
    resources = Resources(BufferPool(streams, options.gather_buffers == "pooled"), streams)
    context = Context(
        resources=resources,
        limiter=RateLimiter(options.rate_limit),
        backward_prefetch=options.backward_prefetch,
        forward_prefetch=options.forward_prefetch,
    )
    context.ignored = plan.ignored.union(*(unit.context.ignored for unit in plan.inner))
    units = [_build_unit(planned, options, groups, resources, device) for planned in plan.units]
    names = {module: name for name, module in reversed(list(walk(root)))}
    for unit in plan.inner:
        unit.move_below(names)
    context.adopt(_in_tree_order(root, units, plan.inner), units[0])
    context.lifted = [(p.fqn, p.tensor.nbytes, [place.fqn for place in p.places]) for p in plan.lifted]
    for unit in plan.inner:
        _share_resources(unit, resources)
    for unit in units:
        attach(unit)
    return context


def _drop_derived_tensors(root: nn.Module) -> None:
    """Attributes computed from parameters when the model was built (torch's older weight norm keeps one) hold a
    graph on them. They are computed again before they are used; until then their values are enough."""
    for module in root.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                module.__dict__[name] = value.detach()


def _shared_bytes(plan: Plan, options: ShardingOptions) -> int:
    """About what this rank asks of its wire: its shards and the gradient sources of the two largest units."""
    sizes = [sum(p.tensor.nbytes for p in unit.parameters) for unit in plan.units]
    return sum(sizes) // (options.sharding_factor or 2) + 2 * max(sizes, default=0)


def _in_tree_order(root: nn.Module, units: list[Unit], inner: list[Unit]) -> list[Unit]:
    first = {module: unit for unit in (*units, *inner) for module in unit.modules}
    ordered = [first[module] for module in root.modules() if module in first]
    return list(dict.fromkeys(ordered))


def _share_resources(unit: Unit, resources: Resources) -> None:
    for handle in unit.handles:
        handle.resources = resources


def _build_unit(
    planned: PlannedUnit, options: ShardingOptions, groups: Groups, resources: Resources, device: torch.device
) -> Unit:
    by_key: dict[tuple[HandleDtypes, bool], list[PlannedParameter]] = {}
    for parameter in planned.parameters:
        dtypes = dtypes_for(parameter.tensor, parameter.places[0].module, options.mixed_precision)
        by_key.setdefault((dtypes, parameter.tensor.requires_grad), []).append(parameter)
    shard_device = torch.device("cpu") if options.cpu_offload else device
    handles = [
        _build_handle(planned.name, members, dtypes, groups, resources, shard_device, options.sync_module_states)
        for (dtypes, _), members in by_key.items()
    ]
    return Unit(
        name=planned.name,
        modules=planned.modules,
        handles=handles,
        groups=groups,
        reshard_after_forward=options.reshard_after_forward,
        mixed_precision=options.mixed_precision,
    )


def _build_handle(
    name: str,
    members: Sequence[PlannedParameter],
    dtypes: HandleDtypes,
    groups: Groups,
    resources: Resources,
    shard_device: torch.device,
    sync_module_states: bool,
) -> FlatParamHandle:
    shapes = [
        ParameterShape(p.fqn, tuple(p.tensor.shape), dense_stride(p.tensor.shape, p.tensor.stride())) for p in members
    ]
    handle = FlatParamHandle(
        unit_name=name,
        layout=build_layout(shapes, groups.sharding_factor),
        places=[tuple(p.places) for p in members],
        dtypes=dtypes,
        wire=groups.shard,
        replicate_wire=groups.replicate,
        resources=resources,
        shard_device=shard_device,
    )
    made = handle.make_parameters([p.tensor.requires_grad for p in members])
    _write_deferred(handle, members, groups, sync_module_states)
    for index, (member, sharded) in enumerate(zip(members, made, strict=True)):
        if not (member.tensor.is_meta or is_deferred(member.tensor)):
            handle.write_original(index, member.tensor)
        _take_identity(member.tensor, sharded, member.places)
    handle.params = tuple(member.tensor for member in members)  # type: ignore[misc]
    return handle


def _write_deferred(
    handle: FlatParamHandle, members: Sequence[PlannedParameter], groups: Groups, sync_module_states: bool
) -> None:
    """Replay deferred parameters one at a time into the shard: no more than one is whole at any moment."""
    deferred = {id(p.tensor): index for index, p in enumerate(members) if is_deferred(p.tensor)}
    names = {id(p.tensor): p.fqn for p in members}
    tensors = [members[index].tensor for index in deferred.values()]
    for tensor, real in stream_unit(tensors, handle.wire.device, names=names):
        if sync_module_states:
            _broadcast(real, names[id(tensor)], groups, handle.wire.device)
        handle.write_original(deferred[id(tensor)], real)
        del real


def _take_identity(original: Tensor, sharded: ShardedTensor, places: Sequence[Place]) -> None:
    """The parameter object stays the same for optimizers and users; its contents become sharded."""
    grad_hooks = original._backward_hooks
    accumulate_hooks = getattr(original, "_post_accumulate_grad_hooks", None)
    extra = user_attributes(original)
    for place in places:
        if isinstance(place.module, nn.RNNBase):
            follow_unit(place.module)
        if not isinstance(place.module._parameters, ParameterTable):
            place.module.__dict__["_parameters"] = ParameterTable(place.module._parameters)
    try:
        original.grad = None
        torch.utils.swap_tensors(original, sharded)
    except RuntimeError as error:
        raise WrapError(
            f"The parameter cannot become a sharded one: {str(error).splitlines()[0]}",
            parameter=places[0].fqn,
            expected="no graph, view or weak reference that still uses the parameter",
            remedy="shard the model before running it, or drop outputs of earlier forwards first",
        ) from error
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(original, hooks, None)  # those of the user are the engine's to call from now on
    original.__dict__.update(extra)
    if grad_hooks:
        original.__dict__["grad_hooks"] = grad_hooks
    if accumulate_hooks:
        original.__dict__["post_accumulate_hooks"] = accumulate_hooks


def broadcast_states(root: nn.Module, plan: Plan, groups: Groups, device: torch.device) -> None:
    """Parameters and buffers of the group's first rank, unit by unit, to all ranks."""
    with torch.no_grad():
        for planned in plan.units:
            for parameter in planned.parameters:
                if not (parameter.tensor.is_meta or is_deferred(parameter.tensor)):
                    _broadcast(parameter.tensor, parameter.fqn, groups, device)
        for module in root.modules():
            if module in plan.ignored:
                continue
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    _broadcast(buffer, name, groups, device)


def _broadcast(tensor: Tensor, fqn: str, groups: Groups, device: torch.device) -> None:
    stride = dense_stride(tensor.shape, tensor.stride())
    spec = ShardSpec(fqn, tensor.shape, stride, LocalSpan(0, 0, 0, 0), groups.shard)
    sent = flat_in_memory_order(tensor.detach(), spec).to(device)
    groups.world.broadcast(sent, 0, Label(-1, "state", fqn)).wait()
    received = sent.as_strided(tensor.shape, stride)
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:  # an expanded buffer: one element in many places
            tensor, received = tensor.narrow(dim, 0, 1), received.narrow(dim, 0, 1)
    tensor.copy_(received)
