"""One unit: a module (or several) whose parameters are gathered and freed together, and its phases.

A step of one unit, in order: ``pre_forward`` (gather, install the full tensors in the modules), the modules'
forward, ``post_forward`` (take them out, free later), ``enter_backward`` (gather again if freed, prefetch the next),
``post_backward`` (free, then reduce). ``context`` holds what units share and decides about order and limits.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from fsdp_core.comm.wire import Label
from fsdp_core.errors import StateError
from fsdp_core.handle.flat_param_handle import FlatParamHandle, HandleState
from fsdp_core.handle.sharded_tensor import ShardedTensor
from fsdp_core.numerics.mixed_precision import cast_floating
from fsdp_core.policy import MixedPrecision
from fsdp_core.runtime.gather_node import collect_early, make_node, tensors_of_node
from fsdp_core.runtime.gradient_flow import collect_now
from fsdp_core.runtime.hooks import num_running
from fsdp_core.runtime.names import join, unit_title
from fsdp_core.runtime.saved_weights import SavedWeight
from fsdp_core.runtime.sites import ParameterSites
from fsdp_core.trace.labels import labelled

if TYPE_CHECKING:
    from fsdp_core.comm.groups import Groups
    from fsdp_core.runtime.context import Context

EARLY_NUMEL = 1 << 18  # gradients of parameters from here on are collected one by one
_PHASES = ("forward", "backward", "reduce", "state")
_current_graph_task_id = torch._C._current_graph_task_id


@dataclass
class ForwardCall:
    """One call of a unit's forward that has not returned."""

    error_before: BaseException | None  # what was being handled when the call began
    label: AbstractContextManager[object]  # the range in a profiler's timeline
    has_hooks: bool = False
    installed: list[Tensor] = field(default_factory=list)
    saved: list[SavedWeight] = field(default_factory=list)


class Unit:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        name: str,
        modules: Sequence[nn.Module],
        handles: Sequence[FlatParamHandle],
        groups: Groups,
        reshard_after_forward: bool,
        mixed_precision: MixedPrecision | None,
    ) -> None:
        self.name = name
        self.unit_id = -1  # given by the context: the same on all ranks
        self.modules = tuple(modules)
        self.handles = tuple(handles)
        self.groups = groups
        self.reshard_after_forward = reshard_after_forward
        self.mixed_precision = mixed_precision
        self.is_root = False
        self.context: Context  # set by Context.adopt
        self.calls: list[ForwardCall] = []
        self.num_saved = 0  # saved weights whose backward is still to come
        self.are_saves_known = False
        self.is_prefetched = False
        self.post_hooks: dict[nn.Module, int] = {}  # ids of the forward hooks, which give the weights back
        self._prepare()

    def _prepare(self) -> None:
        self.params: tuple[ShardedTensor, ...] = tuple(p for handle in self.handles for p in handle.params)
        self.full_nbytes = sum(handle.full_nbytes for handle in self.handles)
        self._locations = [(handle, index) for handle in self.handles for index in range(len(handle.params))]
        self._sites = ParameterSites(self.handles)
        self._positions = {id(parameter): position for position, parameter in enumerate(self.params)}
        self._requires_grad: tuple[bool, ...] = ()
        self.trainable_positions: tuple[int, ...] = ()
        self._early_positions: tuple[int, ...] = ()
        self._early_numel = EARLY_NUMEL
        self._node: weakref.ref[Any] | None = None
        self._node_pass: object = None
        self._recompute_tensors: list[Tensor] | None = None
        self._epochs_at_issue: tuple[int, ...] = ()
        self._labels = {phase: Label(self.unit_id, phase, self.name) for phase in _PHASES}
        for handle in self.handles:
            handle.unit = self
        # no memory to win by freeing what is only a view
        self.frees_after_forward = self.reshard_after_forward and any(h.fixed_full is None for h in self.handles)

    def set_id(self, unit_id: int, name: str) -> None:
        """Called by the context that owns the unit: ids and names count from its root."""
        self.unit_id, self.name = unit_id, name
        self._requires_grad = ()  # who is root may have changed, too
        for handle in self.handles:
            handle.unit_name = name
        self._labels = {phase: Label(unit_id, phase, name) for phase in _PHASES}

    def write_epochs(self) -> tuple[int, ...]:
        return tuple(handle.write_epoch() for handle in self.handles)

    def check_unwritten(self, node: Any) -> None:
        """Where gathered parameters are only a view of the shards, a write in between would change gradients."""
        for handle, then, now in zip(self.handles, node.epochs, self.write_epochs(), strict=True):
            if handle.fixed_full is not None and then != now:
                raise StateError(
                    "A parameter needed for gradient computation was modified in place after the forward that used it.",
                    unit=self.name,
                    parameter=", ".join(p.spec.fqn for p in handle.params[:3]),
                    expected="no optimizer step, load or in-place write between forward and backward",
                    got="a write",
                    remedy="run backward before changing parameters, or run the forward again",
                )

    def move_below(self, names: dict[nn.Module, str]) -> None:
        """A parent was sharded: names count from its root now."""
        self.name = "+".join(unit_title(names[module]) for module in self.modules)
        for handle in self.handles:
            handle.rename(lambda place: join(names[place.module], place.name))

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        return all(handle.state is HandleState.SHARDED for handle in self.handles)

    @property
    def was_written_while_gathering(self) -> bool:
        """Did somebody write parameters between the issue of the last gather and now?"""
        return self._epochs_at_issue != self.write_epochs()

    def issue_unshard(self, phase: str) -> None:
        """Start the gathers of all handles that are sharded."""
        label = self._labels[phase]
        self._epochs_at_issue = self.write_epochs()
        for handle in self.handles:
            if handle.state is HandleState.SHARDED:
                handle.issue_unshard(label)

    def wait_unshard(self) -> None:
        for handle in self.handles:
            if handle.state is HandleState.GATHERING:
                handle.wait_unshard()
        self.is_prefetched = False

    def free_full(self) -> None:
        """Give the gathered buffers back, whatever state they are in."""
        for handle in self.handles:
            if handle.state is not HandleState.SHARDED:
                handle.reshard()
        self.is_prefetched = False
        self._recompute_tensors = None
        self._sites.forget_copies()

    # -- forward -----------------------------------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.context.shows_full:
            return None
        if torch.compiler.is_compiling():
            self._refuse_to_be_compiled(module)
        if torch.is_inference_mode_enabled():  # buffers and views must outlive the mode
            with torch.inference_mode(False), torch.no_grad():
                return self._pre_forward(module, args, kwargs)
        return self._pre_forward(module, args, kwargs)

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context = self.context
        is_recompute = _current_graph_task_id() != -1
        if self.post_hooks[module] not in module._forward_hooks:
            self._refuse_without_hooks(module)
        if self.calls and not is_recompute and num_running(self) <= len(self.calls):
            context.forget_failed_pass()  # those calls were interrupted
        call = ForwardCall(sys.exc_info()[1], labelled("recompute" if is_recompute else "forward", self.name))
        if is_recompute:
            context.note_backward()
            context.unshard_now(self, "backward")
        else:
            context.enter_forward(self)
        self.calls.append(call)
        call.label.__enter__()
        if len(self.calls) == 1:
            call.installed = self.full_tensors()
            self._sites.show(call.installed)
        if self.frees_after_forward and not self.is_root and not is_recompute and torch.is_grad_enabled():
            call.has_hooks = context.saved_tensor_hooks.push(self)
            self.are_saves_known = call.has_hooks
        policy = self.mixed_precision
        if policy is not None and policy.param_dtype is not None and policy.cast_forward_inputs:
            return cast_floating(args, policy.param_dtype), cast_floating(kwargs, policy.param_dtype)
        return None

    def _refuse_to_be_compiled(self, module: nn.Module) -> NoReturn:
        raise StateError(
            "torch.compile reached the engine's hooks, which gather and free weights and cannot be compiled.",
            unit=self.name,
            expected="only code inside of units compiled",
            got=f"{type(module).__name__} compiled with its hooks, by torch.compile(model) or model.compile()",
            remedy="unit.forward = torch.compile(unit.forward) for each unit that has no unit inside "
            "(in the launcher: train.compile=true)",
        )

    def _refuse_without_hooks(self, module: nn.Module) -> None:
        raise StateError(
            "A hook of the engine was removed: nobody would give the gathered weights back.",
            unit=self.name,
            expected="the forward hook that fully_shard registered",
            got=f"{type(module).__name__} without it",
            remedy="remove your own hooks by their handles only",
        )

    def forget_calls(self) -> None:
        """Forwards that will not return are taken back."""
        if self.calls:
            self.calls.clear()
            self._sites.hide()
        self.num_saved = 0

    def full_tensors(self) -> list[Tensor]:
        """One full tensor per parameter: outputs of the unit's node where it trains, plain views elsewhere."""
        self._check_parameters()
        fresh = [view.data for handle in self.handles for view in handle.full_views()]
        if not self.trainable_positions or not torch.is_grad_enabled():
            return fresh
        outputs = None
        node = self._node() if self._node is not None else None
        if node is not None and self._node_pass is self.context.current and node.positions == self.trainable_positions:
            outputs = tensors_of_node(node)
        if outputs is None:
            full = [fresh[position] for position in self.trainable_positions]
            sharded = [self.params[position] for position in self.trainable_positions]
            outputs, node = make_node(self, full, sharded)
            self._node, self._node_pass = weakref.ref(node), self.context.current
        for position, output in zip(self.trainable_positions, outputs, strict=True):
            fresh[position] = output
        for position in self._early_positions:
            fresh[position] = collect_early(self, position, fresh[position])
        return fresh

    def fresh_full_tensor(self, index: int) -> Tensor:
        """Output ``index`` of the node once more, on the present buffer."""
        handle, segment = self._locations[self.trainable_positions[index]]
        return handle.full_views()[segment].data

    def _check_parameters(self) -> None:
        """Notice flips of ``requires_grad`` and parameters that were replaced after wrapping."""
        flags = tuple([parameter.requires_grad for parameter in self.params])
        if flags != self._requires_grad:
            for handle in self.handles:
                if handle.flat_parameter is not None:
                    handle.refuse_partly_frozen()
            self._requires_grad = flags
            self.trainable_positions = tuple(i for i, needs_grad in enumerate(flags) if needs_grad)
            self._early_positions = tuple(i for i in self.trainable_positions if self._is_collected_early(i))
        self._sites.check(self.name)

    def _is_collected_early(self, position: int) -> bool:
        """Large gradients; but not the root's, whose backward takes as long as the whole pass: memory to collect
        them in would be taken all the while. With F = 1 that memory is the gradient's own, which is there anyway."""
        handle, index = self._locations[position]
        segment = handle.layout.segments[index]
        return segment.numel >= self._early_numel and (not self.is_root or handle.wire.group_size == 1)

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self.calls:
            return None
        call = self.calls.pop()
        call.label.__exit__(None, None, None)
        is_recompute = _current_graph_task_id() != -1
        error = sys.exc_info()[1]
        has_failed = output is None and error is not None and error is not call.error_before
        if call.has_hooks:
            self.context.saved_tensor_hooks.pop(self)
        if not self.calls:
            self._sites.hide()
            if not has_failed:
                self._write_back_changes(call)
        if not is_recompute:
            self.context.leave_forward(self, has_failed)
        if self.is_root and not has_failed and self.mixed_precision is not None and self.mixed_precision.output_dtype:
            return cast_floating(output, self.mixed_precision.output_dtype)
        return None

    def _write_back_changes(self, call: ForwardCall) -> None:
        """A full tensor whose version moved was written by its module: the shard takes the new values."""
        for position, tensor in enumerate(call.installed):
            if tensor._version == 0:
                continue
            handle, index = self._locations[position]
            start, end = handle.segment_range(index)
            current = [
                saved
                for saved in call.saved
                if saved.handle is handle and start <= saved.start < end and saved.version == tensor._version
            ]
            with torch.no_grad():
                handle.write_back(index, tensor)
            others = [saved for saved in call.saved if saved.handle is handle and not start <= saved.start < end]
            for saved in (*current, *others):  # what was saved after the write, or of other parameters, is still right
                saved.epoch = handle.write_epoch()
        node = self._node() if self._node is not None else None
        if node is not None:
            node.epochs = self.write_epochs()

    @property
    def needs_weights_in_backward(self) -> bool:
        """False when it is known that autograd saved none of its weights (a first layer whose input needs no
        gradient). Under hooks of others (activation checkpointing) nothing is known."""
        return self.num_saved > 0 or not self.are_saves_known

    # -- backward ----------------------------------------------------------------------------------------------------

    def note_saved(self, saved: SavedWeight) -> None:
        self.num_saved += 1
        if self.calls:
            self.calls[0].saved.append(saved)

    def enter_backward(self, saved: SavedWeight) -> None:
        """Autograd needs one of this unit's weights."""
        context = self.context
        context.note_backward()
        context.unshard_now(self, "backward")
        if saved.is_counted:
            saved.is_counted = False
            self.num_saved -= 1
            if self.num_saved == 0:
                context.close_later(self)

    def tensor_for_recompute(self, parameter: ShardedTensor) -> Tensor:
        """A module of this unit is run again by activation checkpointing, outside any forward hook."""
        self.context.note_backward()
        self.context.unshard_now(self, "backward")
        if self._recompute_tensors is None:
            self._recompute_tensors = self.full_tensors()
        return self._recompute_tensors[self.position_of(parameter)]

    def early_gradient(self, node: Any, position: int, grad: Tensor) -> Tensor | None:
        """The gradient of one parameter is complete: collect it now, or (``grad``) with the others of the unit."""
        self.context.note_backward()
        handle, index = self._locations[position]
        return None if collect_now(self.context, handle, index, node, position, grad) else grad

    def post_backward(self, node: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """All gradients of the unit are there: free the parameters, then reduce."""
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            node.is_spent = True
        self._recompute_tensors = None
        self.check_unwritten(node)
        return self.context.reduce_unit(self, node, grads)

    def position_of(self, parameter: ShardedTensor) -> int:
        """Its place among the unit's parameters."""
        return self._positions[id(parameter)]

    def grads_by_handle(
        self, positions: Sequence[int], grads: Sequence[Tensor | None]
    ) -> list[tuple[FlatParamHandle, dict[int, Tensor], list[int]]]:
        """Per handle: gradients that are present, by segment index, and all indices that take part."""
        found: dict[int, tuple[FlatParamHandle, dict[int, Tensor], list[int]]] = {}
        for position, grad in zip(positions, grads, strict=True):
            handle, index = self._locations[position]
            entry = found.get(id(handle))
            if entry is None:
                entry = found[id(handle)] = (handle, {}, [])
            entry[2].append(index)
            if grad is not None:
                entry[1][index] = grad
        return list(found.values())

    @property
    def reduce_label(self) -> Label:
        return self._labels["reduce"]

    @property
    def state_label(self) -> Label:
        return self._labels["state"]

    # -- copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        if id(self) in memo:
            return memo[id(self)]
        copied = object.__new__(Unit)
        memo[id(self)] = copied
        copied.name, copied.unit_id, copied.groups, copied.is_root = self.name, self.unit_id, self.groups, self.is_root
        copied.reshard_after_forward, copied.mixed_precision = self.reshard_after_forward, self.mixed_precision
        copied.calls, copied.num_saved, copied.is_prefetched, copied.are_saves_known = [], 0, False, False
        copied.modules = deepcopy(self.modules, memo)
        copied.post_hooks = {new: self.post_hooks[old] for old, new in zip(self.modules, copied.modules, strict=True)}
        copied.handles = deepcopy(self.handles, memo)
        copied.context = deepcopy(self.context, memo)
        copied._prepare()
        return copied
