"""The public functions. ``fully_shard`` annotates a module in place; ``wrapper.py`` is a thin shell around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from fsdp_core.comm.counting import SentBytes, total_sent
from fsdp_core.describe import ModelReport, describe_model
from fsdp_core.errors import StateError, WrapError
from fsdp_core.handle.flat_parameter import FlatParameter, FlatSegment
from fsdp_core.numerics.grad_norm import clip_grad_norm
from fsdp_core.numerics.grad_scaler import AgreeingGradScaler
from fsdp_core.policy import GatherBuffers, MixedPrecision, RateLimit, WireChoice
from fsdp_core.runtime.build import build
from fsdp_core.runtime.find import contexts_in
from fsdp_core.runtime.hooks import ForwardMethod, unit_of
from fsdp_core.runtime.join import joined
from fsdp_core.runtime.names import unwrapped
from fsdp_core.runtime.options import ShardingOptions
from fsdp_core.runtime.schedule_agreement import verify
from fsdp_core.runtime.step_guard import refuse_unsent
from fsdp_core.state.full_parameters import full_parameters_of
from fsdp_core.state.model_state import load_model_state, model_state_dict
from fsdp_core.state.optim_state import load_optimizer_state, optimizer_state_dict
from fsdp_core.trace.events import EventLog, FlightRecorder

T = TypeVar("T")


def fully_shard(
    module: nn.Module,
    *,
    units: Any = None,
    sharding_factor: int | None = None,
    process_group: Any = None,
    mesh: Any = None,
    reshard_after_forward: bool = True,
    mixed_precision: MixedPrecision | None = None,
    backward_prefetch: bool = True,
    forward_prefetch: bool = False,
    rate_limit: RateLimit = RateLimit(max_inflight=2),
    gather_buffers: GatherBuffers = "pooled",
    ignored_modules: Iterable[nn.Module] = (),
    sync_module_states: bool = False,
    cpu_offload: bool = False,
    wire: WireChoice = "auto",
    device: torch.device | str | None = None,
    ranks_per_host: int | None = None,
) -> nn.Module:
    """Shard ``module`` in place over the ranks of a group, and return it.

    Every rank of the group calls this with an equal model. Parameters keep their names and their identity: an
    optimizer built before works as one built after. Also callable module by module, children before parents.

    Args:
        units: what becomes a unit below the root: classes or class names, modules, tuples of modules that form one
            unit, a predicate ``(fqn, module)``, a number of elements, or a ``UnitPolicy``. ``None``: one unit.
        sharding_factor: F, a divisor of the number of ranks W. 1 replicates, W (``None``) shards over all ranks.
        process_group: the ranks to use; default: all. mesh: a DeviceMesh with one axis (shard) or two (replicate,
            shard), instead of ``process_group``.
        reshard_after_forward: free gathered parameters between forward and backward (RAF), or keep them (NRAF).
        mixed_precision: dtypes of compute, reduction and buffers.
        backward_prefetch: gather the next unit of backward ahead of this unit's reduction.
        forward_prefetch: gather the next unit of forward early; for models that run in the same order each time.
        rate_limit: how many gathers may be in flight.
        gather_buffers: ``pooled`` (few buffers, reused) or ``allocator`` (a fresh allocation per gather).
        ignored_modules: left alone, with all their parameters.
        sync_module_states: start from the first rank's values; otherwise different values raise.
        cpu_offload: keep shards, gradients and optimizer state in host memory.
        wire: how collectives travel. device: where units compute; default: the current CUDA device, else CPU.
        ranks_per_host: consecutive ranks that share a host, for counting bytes within and across hosts.

    Raises:
        WrapError: the model cannot be sharded as asked. MismatchError: the ranks hold different models.
    """
    if not isinstance(module, nn.Module):
        raise WrapError("Only modules can be sharded.", expected="an nn.Module", got=type(module).__name__)
    options = ShardingOptions(
        units=units,
        sharding_factor=sharding_factor,
        process_group=process_group,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        mixed_precision=mixed_precision,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
        rate_limit=rate_limit,
        gather_buffers=gather_buffers,
        ignored_modules=(ignored_modules,) if isinstance(ignored_modules, nn.Module) else tuple(ignored_modules or ()),
        sync_module_states=sync_module_states,
        cpu_offload=cpu_offload,
        wire=wire,
        device=None if device is None else torch.device(device),
        ranks_per_host=ranks_per_host,
    )
    build(unwrapped(module), options)
    return module


class ShardedGradScaler(AgreeingGradScaler):
    """``torch.amp.GradScaler`` whose decision to skip a step is the same on all ranks of ``model``'s group.

    Args:
        model: the sharded model. device: the type of the device that gradients live on. Others: as torch's.
    """

    def __init__(self, model: nn.Module, device: str = "cpu", **settings: Any) -> None:
        wires = [context.root.groups.world for context in contexts_in(model)]
        super().__init__(list(dict.fromkeys(wires)), device, **settings)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes in this block send nothing; their sum is sent by the first backward after it."""
    contexts = contexts_in(model)
    before = [context.sync_gradients for context in contexts]
    for context in contexts:
        context.sync_gradients = False
    try:
        yield
    finally:
        for context, was in zip(contexts, before, strict=True):
            context.sync_gradients = was


def join(model: nn.Module, batches: Iterable[T]) -> Iterator[tuple[T, float]]:
    """Iterate over ``batches`` although ranks have different numbers of them; every rank has to.

    Yields (batch, weight): weight 0 marks a batch that is repeated because this rank has run out. Multiply the loss
    by the weight and run the same loop body on all ranks. Gradients are still divided by the number of ranks (see
    ``set_gradient_divide_factor``).
    """
    return joined(contexts_in(model)[0].root.groups.world, batches)


def set_gradient_divide_factor(model: nn.Module, factor: float | None) -> None:
    """Divide summed gradients by ``factor`` instead of the number of ranks (``None``: the number of ranks again).

    With 1, gradients are sums over ranks: divide the loss by the global number of tokens yourself, and ranks with
    different numbers of tokens are weighted right.
    """
    if factor is not None and not factor > 0:
        raise StateError("The gradient divide factor must be positive.", got=factor)
    for context in contexts_in(model):
        context.divide_factor = factor if factor is None else float(factor)


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients so that the norm of the whole gradient is at most ``max_norm``.

    Returns: that norm before clipping, 0-dim, equal on all ranks. Every rank has to call this.

    Raises:
        NumericsError: on all ranks, before any gradient is touched, if the norm is not finite and
            ``error_if_nonfinite`` is set.
        StateError: gradients of micro-batches were summed inside ``no_sync`` and have not been sent.
    """
    contexts = contexts_in(model)
    for context in contexts:
        for _, handle in context.each_handle():
            refuse_unsent(context, handle, "Gradients are clipped")
    handles = [handle for context in contexts for _, handle in context.each_handle()]
    return clip_grad_norm(handles, model, max_norm, norm_type, error_if_nonfinite)


@contextmanager
def full_parameters(
    model: nn.Module,
    writeback: bool = True,
    with_grads: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
) -> Iterator[None]:
    """Inside the block the model has ordinary, whole parameters in full precision (and gradients, if asked for).

    Args:
        writeback: keep what was written to them. rank0_only: only the first rank sees them (without writeback).
        offload_to_cpu: put them in host memory.
    """
    with full_parameters_of(
        contexts_in(model),
        writeback=writeback,
        with_grads=with_grads,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
    ):
        yield


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat ``module.method_name(...)`` like a forward: the unit is gathered before and freed after it.

    Raises:
        StateError: the module is not a unit, or has no such method.
    """
    unit = unit_of(unwrapped(module))
    target = unwrapped(module)
    method = getattr(target, method_name, None)
    if unit is None or not callable(method):
        raise StateError(
            "Only methods of a unit's module can become forward methods.",
            expected=f"a unit with a method {method_name!r}",
            got=type(target).__name__,
            remedy="make the module a unit, or register the method of the unit that contains it",
        )

    target.__dict__[method_name] = ForwardMethod(unit, target, method)


def flat_parameters(model: nn.Module) -> list[FlatParameter]:
    """One plain 1-D parameter per flat parameter that trains: the fast face for optimizers.

    Each one's ``data`` is this rank's shard itself and its ``grad`` the reduced gradient; ``segments`` says which
    elements are which original parameter. ``grad`` of ``model.parameters()`` stays in step: a view of the flat
    gradient, made when looked at. Frozen flat parameters are left out.
    """
    found = []
    for context in contexts_in(model):
        for unit, handle in context.each_handle():
            if not any(parameter.requires_grad for parameter in handle.params):
                continue
            handle.refuse_partly_frozen()
            if handle.flat_parameter is None:
                flat = FlatParameter(handle.sharded)
                flat.unit_name, flat.wire = unit.name, handle.wire
                flat.segments = tuple(
                    FlatSegment(segment, parameter.spec.span)
                    for segment, parameter in zip(handle.layout.segments, handle.params, strict=True)
                )
                handle.gradient.move_to(flat)
                handle.flat_parameter = flat
            found.append(handle.flat_parameter)
    return found


def observed_order(model: nn.Module) -> list[tuple[str, int]]:
    """(unit name, number of elements) in the order of the last forward, each unit once, the root left out.

    Small units can be merged by it: ``regroup_by_order([(module_of(name), numel), ...], target_numel)`` gives the
    ``units`` for a freshly built model (the paper's dynamic construction of units).
    """
    order = []
    for context in contexts_in(model):
        for unit_id in dict.fromkeys(context.current.order.recorded):
            unit = context.units[unit_id]
            if not unit.is_root:
                order.append((unit.name, sum(handle.layout.numel for handle in unit.handles)))
    return order


def describe(model: nn.Module) -> ModelReport:
    """What was really built: rank tables, wires, units, dtypes, bytes."""
    return describe_model(model)


def bytes_sent(model: nn.Module) -> dict[str, SentBytes]:
    """What this rank has sent for ``model`` since it was sharded, by primitive (``all_gather``, ...): subtract two
    calls to count what lies between. On shared memory, what its peers have read of it."""
    wires = {
        id(wire): wire
        for context in contexts_in(model)
        for unit in context.units
        for wire in (unit.groups.shard, unit.groups.replicate, unit.groups.world)
    }
    return total_sent(wire.counter for wire in wires.values())


def state_dict(
    model: nn.Module,
    kind: Literal["full", "sharded", "local"] = "full",
    *,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
) -> dict[str, Any]:
    """The model's state in original names and shapes.

    kind: ``full`` gathers whole tensors, unit by unit (every rank calls; ``rank0_only``: the others get ``{}``);
    ``sharded`` gives this rank's parts as sharded tensors, without communication; ``local`` the raw flat shards.
    """
    return model_state_dict(model, kind, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)


def load_state_dict(model: nn.Module, state: dict[str, Any], strict: bool = True) -> Any:
    """Load any kind of state dict; returns, and raises, what ``nn.Module.load_state_dict`` does."""
    return load_model_state(model, state, strict)


def optim_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    kind: Literal["full", "sharded"] = "full",
    *,
    rank0_only: bool = False,
) -> dict[str, Any]:
    """The optimizer's state by original parameter name and in original shapes, whichever face it steps on."""
    return optimizer_state_dict(model, optimizer, kind, rank0_only)


def load_optim_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what ``optim_state_dict`` gave, from any number of ranks, F and units."""
    load_optimizer_state(model, optimizer, state)


def start_trace(model: nn.Module, *, has_clock: bool = False) -> EventLog:
    """Write what the engine does from now on into one log, which is returned. ``has_clock``: with host times."""
    log = EventLog(has_clock)
    for context in contexts_in(model):
        context.log = log
    return log


def verify_schedule(model: nn.Module, log: EventLog) -> None:
    """Check what ``log`` holds of one or more whole steps; every rank has to call this.

    Raises:
        StateError: on all ranks, if on any a unit was used before it was gathered or after it was freed, parameters
            were written during a gather, more gathers were in flight than allowed, ... It says which, and where.
        MismatchError: on all ranks, if they gathered or reduced in different orders.
    """
    for context in contexts_in(model):
        verify(context, log.events)


def stop_trace(model: nn.Module) -> None:
    """Write nothing more."""
    for context in contexts_in(model):
        context.log = None


def record_flight(model: nn.Module, recorder: FlightRecorder | None) -> None:
    """Tell ``recorder`` what the engine is about to do, event by event, from now on; None: nobody.

    Meant to be cheap enough to be always on, and readable from outside when the process no longer answers.
    """
    for context in contexts_in(model):
        context.flight = recorder
