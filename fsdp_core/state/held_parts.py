"""What this rank holds of the model's and the optimizer's state, as live views: nothing is copied or sent.

For those who save and load themselves, piece by piece, at any number of ranks. Every tensor of the state has its
original name and shape; a rank holds a half-open span of its elements, counted in memory order. Ranks that hold the
same span are named, so that they can share the writing: all of them see the same parts in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.handle.flat_param_handle import FlatParamHandle
from fsdp_core.handle.flat_parameter import FlatParameter
from fsdp_core.handle.sharded_tensor import ShardedTensor
from fsdp_core.layout.flat_layout import contiguous_stride, dense_stride
from fsdp_core.numerics.optimizers.geometry import holding_of
from fsdp_core.numerics.optimizers.whole_parameter import WholeParameterOptimizer
from fsdp_core.runtime.context import Context
from fsdp_core.runtime.find import contexts_in
from fsdp_core.runtime.unit import Unit
from fsdp_core.state.model_state import StateEntry, state_entries
from fsdp_core.state.optim_state import names_in, state_entries_of


@dataclass(frozen=True, eq=False)
class HeldPart:
    """A span of one tensor of the state.

    name: of the original parameter or buffer. key: "" for that itself, else the optimizer's word ("exp_avg").
    shape, stride: of the whole tensor. start, end: this rank's elements, in memory order.
    values: [end - start], a view: writing to it writes the state.
    holders: global ranks that hold these same elements, this one among them.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    end: int
    values: Tensor
    holders: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return torch.Size(self.shape).numel()


@dataclass
class HeldModel:
    """Of a model. buffers: names of parts that are buffers. aliases: further names of tied parameters, to their first.
    extra: modules with an extra state of their own, by that state's name."""

    parts: list[HeldPart] = field(default_factory=list)
    buffers: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    extra: dict[str, nn.Module] = field(default_factory=dict)


@dataclass
class HeldOptimizer:
    """Of an optimizer. values: state that is no tensor, by name and key. groups: names of each group's parameters."""

    parts: list[HeldPart] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)


def held_model(model: nn.Module, left_out: Collection[nn.Module] = ()) -> HeldModel:
    """Parameters and buffers as this rank holds them, as live views; the state dict's names. No communication.

    left_out: modules whose own parameters and buffers somebody else takes care of.
    """
    homes = _Homes(contexts_in(model))
    held, first_names = HeldModel(), dict[int, str]()
    for entry in state_entries(model):
        if any(entry.module is module for module in left_out):
            continue
        if entry.kind == "extra":
            held.extra[entry.name] = entry.module
            continue
        first = first_names.setdefault(id(entry.value), entry.name)
        if first != entry.name:
            held.aliases[entry.name] = first
            continue
        if entry.kind == "buffer":
            held.buffers.add(entry.name)
        held.parts.append(_model_part(entry, homes))
    return held


def fill_model(model: nn.Module, source: Callable[[HeldPart], Tensor], left_out: Collection[nn.Module] = ()) -> None:
    """Write parameters and buffers: ``source`` gives the new elements of a part, 1-D in its memory order, on any device
    and in any dtype that converts. Every rank calls. Extra states stay as they are."""
    for context in contexts_in(model):
        context.settle()  # a peer may still be reading what is about to be written
    parts = {part.name: part for part in held_model(model, left_out).parts}
    with torch.no_grad():
        for entry in state_entries(model):
            part = parts.pop(entry.name, None)
            if part is None:
                continue
            elements = source(part)
            if isinstance(entry.value, ShardedTensor):
                entry.value.copy_(ShardedTensor(elements, entry.value.spec))
            else:
                entry.value.copy_(elements.as_strided(part.shape, part.stride))


def held_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, left_out: Collection[Tensor] = ()
) -> HeldOptimizer:
    """The optimizer's state as this rank holds it, as live views, by original parameter name. No communication.

    left_out: parameters whose state somebody else takes care of.
    """
    homes, names, held = _Homes(contexts_in(model)), names_in(model), HeldOptimizer()
    for group in optimizer.param_groups:
        held.groups.append([name for parameter in group["params"] for name in names.of(parameter)])
    if isinstance(optimizer, WholeParameterOptimizer):
        for holding, piece, kept in optimizer.live_states():
            holders = homes.world if holding.home is None else homes.of(holding.param)
            for key, value in kept.items():
                _add(held, piece.fqn or names.of(holding.param)[0], key, value, holders)
        return held
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state or any(parameter is other for other in left_out):
                continue
            if isinstance(parameter, (ShardedTensor, FlatParameter)):
                _add_sharded(held, parameter, optimizer, homes)
                continue
            for key, value in state.items():
                _add(held, names.of(parameter)[0], key, value, homes.world)
    return held


def flat_view(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """``tensor`` as 1-D in memory order, a view where it is dense, and the strides that this order follows."""
    tensor = tensor.detach()
    stride = dense_stride(tuple(tensor.shape), tensor.stride())
    if tensor.stride() != stride and tensor.numel() > 1:
        stride = contiguous_stride(tuple(tensor.shape))
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)), stride


class _Homes:
    """From a parameter to the ranks of its unit's replication group."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._by_handle: dict[int, tuple[int, ...]] = {}
        groups = contexts[0].root.groups
        self.world: tuple[int, ...] = tuple(rank for row in groups.table.rows for rank in row)
        for unit, handle in _handles(contexts):
            holders = unit.groups.table.replicate_group(unit.groups.rank)
            self._by_handle[id(handle)] = holders
            if handle.flat_parameter is not None:
                self._by_handle[id(handle.flat_parameter)] = holders

    def of(self, parameter: Tensor) -> tuple[int, ...]:
        owner = parameter.base if isinstance(parameter, FlatParameter) else parameter.owner  # type: ignore[attr-defined]
        return self._by_handle[id(owner)]


def _handles(contexts: Sequence[Context]) -> Iterator[tuple[Unit, FlatParamHandle]]:
    for context in contexts:
        yield from context.each_handle()


def _model_part(entry: StateEntry, homes: _Homes) -> HeldPart:
    value = entry.value
    if isinstance(value, ShardedTensor):
        spec, span = value.spec, value.spec.span
        holders = homes.of(value)
        return HeldPart(
            entry.name, "", tuple(spec.shape), spec.stride, span.start, span.end, value.local.detach(), holders
        )
    values, stride = flat_view(value)
    return HeldPart(entry.name, "", tuple(value.shape), stride, 0, value.numel(), values, homes.world)


def _add(held: HeldOptimizer, name: str, key: str, value: Any, holders: tuple[int, ...]) -> None:
    if isinstance(value, Tensor):
        values, stride = flat_view(value)
        held.parts.append(HeldPart(name, key, tuple(value.shape), stride, 0, value.numel(), values, holders))
    else:
        held.values.setdefault(name, {})[key] = value


def _add_sharded(held: HeldOptimizer, parameter: Tensor, optimizer: torch.optim.Optimizer, homes: _Homes) -> None:
    holders = homes.of(parameter)
    for entry in state_entries_of(holding_of(parameter), optimizer):
        piece = entry.piece
        if not entry.is_part:
            _add(held, piece.fqn, entry.key, entry.value, homes.world)
            continue
        held.parts.append(
            HeldPart(
                piece.fqn, entry.key, piece.shape, piece.stride, piece.start, piece.end, entry.value.detach(), holders
            )
        )
