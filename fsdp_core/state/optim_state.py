"""State dicts of the optimizer in original names and shapes, whichever face it steps on.

The form is torch's with names for numbers: ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``.

======================================  ===========================================================================
value in the optimizer's state          in the state dict
======================================  ===========================================================================
one element per parameter element       assembled or cut like the parameter
``whole[name][key]`` (row, column sums) as it is, under that parameter
``parts[name][key]``                    assembled or cut like the parameter
anything else (step counts)             as it is, under every parameter it belongs to
state of a ``WholeParameterOptimizer``  as the wrapped optimizer keeps it; shared out by the owners for ``full``
======================================  ===========================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from fsdp_core.errors import StateError
from fsdp_core.handle.flat_param_handle import FlatParamHandle
from fsdp_core.handle.flat_parameter import FlatParameter
from fsdp_core.handle.sharded_tensor import ShardedTensor
from fsdp_core.numerics.optimizers.base import ShardedOptimizer
from fsdp_core.numerics.optimizers.geometry import Holding, Piece, holding_of
from fsdp_core.numerics.optimizers.whole_parameter import WholeParameterOptimizer
from fsdp_core.runtime.context import Context
from fsdp_core.runtime.find import contexts_in
from fsdp_core.runtime.unit import Unit
from fsdp_core.state.full_parameters import gather_flat, whole_views
from fsdp_core.state.model_state import state_entries

_SCALAR_KEYS = frozenset({"step", "mu_product", "eta", "mu"})
"""0-dim state of torch's optimizers that is no element of a 0-dim parameter."""


@dataclass(frozen=True, eq=False)
class Names:
    """From parameter objects to names."""

    by_id: dict[int, str]

    def of(self, parameter: Tensor) -> list[str]:
        if isinstance(parameter, FlatParameter):
            return [one.segment.fqn for one in parameter.segments]
        name = self.by_id.get(id(parameter))
        if name is None:
            raise StateError(
                "The optimizer holds a parameter that is not part of the model.",
                got=f"shape {tuple(parameter.shape)}, {parameter.dtype}",
                remedy="build the optimizer from the parameters of this model, after sharding it",
            )
        return [name]


@dataclass(frozen=True, eq=False)
class OptimizerEntry:
    """One value of the state, as it belongs to one original parameter. ``is_part``: it is 1-D and holds the elements
    of the parameter that this rank holds."""

    piece: Piece
    key: str
    value: Any
    is_part: bool


def names_in(model: nn.Module) -> Names:
    by_id: dict[int, str] = {}
    for entry in state_entries(model):
        if entry.kind == "parameter":
            by_id.setdefault(id(entry.value), entry.name)
    return Names(by_id)


def _handles(contexts: list[Context]) -> Iterator[tuple[Unit, FlatParamHandle]]:
    for context in contexts:
        yield from context.each_handle()


# -- saving -----------------------------------------------------------------------------------------------------------


def optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, kind: Literal["full", "sharded"], rank0_only: bool
) -> dict[str, Any]:
    """See ``fsdp_core.optim_state_dict``."""
    if kind not in ("full", "sharded"):
        raise StateError("The kind of an optimizer state dict is not understood.", expected="full or sharded", got=kind)
    contexts, names = contexts_in(model), names_in(model)
    if isinstance(optimizer, WholeParameterOptimizer):
        state = optimizer.full_state() if kind == "full" else optimizer.owned_state()
    else:
        state = _sharded_states(contexts, optimizer, kind)
        for parameter, values in optimizer.state.items():
            if not isinstance(parameter, (ShardedTensor, FlatParameter)):
                state[names.of(parameter)[0]] = {key: _copy(value) for key, value in values.items()}
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({**settings, "params": [name for p in group["params"] for name in names.of(p)]})
    first = contexts[0].root.groups
    if rank0_only and first.rank != first.table.rows[0][0]:
        return {"state": {}, "param_groups": []}
    return {"state": state, "param_groups": groups}


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _sharded_states(contexts: list[Context], optimizer: torch.optim.Optimizer, kind: str) -> dict[str, dict[str, Any]]:
    holdings: dict[int, list[Holding]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, (ShardedTensor, FlatParameter)) and optimizer.state.get(parameter):
                key = id(parameter.base) if isinstance(parameter, FlatParameter) else id(parameter.owner)
                holdings.setdefault(key, []).append(holding_of(parameter))
    state: dict[str, dict[str, Any]] = {}
    for unit, handle in _handles(contexts):
        own = holdings.get(id(handle), []) + holdings.get(id(handle.flat_parameter), [])
        state.update(_state_of_handle(unit, handle, [e for h in own for e in state_entries_of(h, optimizer)], kind))
    return state


def state_entries_of(holding: Holding, optimizer: torch.optim.Optimizer) -> Iterator[OptimizerEntry]:
    for key, value in optimizer.state[holding.param].items():
        if isinstance(optimizer, ShardedOptimizer) and key in ("whole", "parts"):
            for piece in holding.pieces:
                for inner, tensor in value.get(piece.fqn, {}).items():
                    yield OptimizerEntry(piece, inner, tensor, key == "parts")
            continue
        is_part = _is_elementwise(value, holding.param)
        local = holding.local(value) if is_part else value
        for piece in holding.pieces:
            yield OptimizerEntry(piece, key, piece.of(local) if is_part else value, is_part)


def _is_elementwise(value: Any, parameter: Tensor) -> bool:
    if isinstance(value, ShardedTensor):
        return True
    is_flat = isinstance(parameter, FlatParameter) and isinstance(value, Tensor)
    return is_flat and value.dim() == 1 and value.numel() == parameter.numel()


def _state_of_handle(
    unit: Unit, handle: FlatParamHandle, entries: Sequence[OptimizerEntry], kind: str
) -> dict[str, dict[str, Any]]:
    """Per name what the optimizer keeps; element-wise values of one key are gathered together."""
    indices = {parameter.spec.fqn: index for index, parameter in enumerate(handle.params)}
    found: dict[str, dict[str, Any]] = {entry.piece.fqn: {} for entry in entries}
    parts: dict[str, list[OptimizerEntry]] = {}
    for entry in entries:
        if entry.is_part:
            parts.setdefault(entry.key, []).append(entry)
        else:
            found[entry.piece.fqn][entry.key] = _copy(entry.value)
    for key in sorted(parts):
        own = parts[key]
        shard = own[0].value.new_zeros(handle.layout.shard_numel)
        for entry in own:
            span = handle.params[indices[entry.piece.fqn]].spec.span
            shard[span.shard_start : span.shard_end].copy_(entry.value)
        whole = whole_views(handle, gather_flat(handle, shard, unit.state_label)) if kind == "full" else None
        for entry in own:
            index = indices[entry.piece.fqn]
            if whole is not None:
                found[entry.piece.fqn][key] = whole[index].clone()
            else:
                spec = handle.params[index].spec
                local = shard[spec.span.shard_start : spec.span.shard_end].clone()
                found[entry.piece.fqn][key] = ShardedTensor(local, spec)
    return found


# -- loading ----------------------------------------------------------------------------------------------------------


class StateSource(Protocol):
    """Saved state by original name, wherever it comes from; what is not there has no keys."""

    def tensors(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what was kept as tensors, by key."""

    def values(self, name: str) -> Mapping[str, Any]:
        """The rest, by key."""

    def part(self, name: str, key: str, piece: Piece) -> Tensor:
        """The elements of a tensor of the parameter's shape that ``piece`` holds: 1-D, in its memory order, on any
        device; it is copied."""

    def whole(self, name: str, key: str) -> Tensor:
        """A tensor as a whole; it is copied."""


class _DictSource:
    """The ``state`` of a state dict of this module."""

    def __init__(self, by_name: Mapping[str, dict[str, Any]]) -> None:
        self._by_name = by_name

    def tensors(self, name: str) -> Mapping[str, tuple[int, ...]]:
        found = self._by_name.get(name, {})
        return {key: tuple(value.shape) for key, value in found.items() if isinstance(value, Tensor)}

    def values(self, name: str) -> Mapping[str, Any]:
        return {key: value for key, value in self._by_name.get(name, {}).items() if not isinstance(value, Tensor)}

    def part(self, name: str, key: str, piece: Piece) -> Tensor:
        return _part(self._by_name[name][key], piece)

    def whole(self, name: str, key: str) -> Tensor:
        value: Tensor = self._by_name[name][key].detach()
        return value


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """See ``fsdp_core.load_optim_state_dict``."""
    _load_groups(optimizer, saved["param_groups"], names_in(model))
    if isinstance(optimizer, WholeParameterOptimizer):
        optimizer.load_owned_state(dict(saved["state"]))
        return
    fill_optimizer(model, optimizer, _DictSource(saved["state"]))


def fill_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, source: StateSource, left_out: Collection[Tensor] = ()
) -> None:
    """The optimizer's state from ``source``, each rank its own part of it; settings of its groups stay.

    left_out: parameters whose state somebody else takes care of.
    """
    if isinstance(optimizer, WholeParameterOptimizer):
        names = [piece.fqn for _, piece, _ in optimizer.live_states()]
        optimizer.load_owned_state({name: state for name in names if (state := _whole_state(source, name))})
        return
    names_of = names_in(model).of
    kept = [p for group in optimizer.param_groups for p in group["params"] if all(p is not other for other in left_out)]
    elementwise = _elementwise_keys(kept, source)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if any(parameter is other for other in left_out):
                continue
            present = [name for name in names_of(parameter) if source.tensors(name) or source.values(name)]
            if not present:
                optimizer.state.pop(parameter, None)
            elif isinstance(parameter, (FlatParameter, ShardedTensor)):
                optimizer.state[parameter] = _local_state(holding_of(parameter), optimizer, group, source, elementwise)
            else:
                state = _whole_state(source, present[0])
                optimizer.state[parameter] = {
                    key: placed(key, value, parameter.device, group) for key, value in state.items()
                }


def _whole_state(source: StateSource, name: str) -> dict[str, Any]:
    return {**source.values(name), **{key: source.whole(name, key) for key in source.tensors(name)}}


def placed(key: str, value: Any, device: torch.device, group: Mapping[str, Any]) -> Any:
    """A copy where torch's optimizers want it: beside the parameter, but for step counts that the host keeps."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return value.detach().clone()
    return value.detach().to(device, copy=True)


def _elementwise_keys(parameters: Sequence[Tensor], source: StateSource) -> set[str]:
    """Keys whose values have one element per parameter element. A 0-dim value of a 0-dim parameter says nothing by
    itself: the other parameters decide, and without any the key's name."""
    keys: set[str] = set()
    scalars: set[str] = set()
    others: set[str] = set()
    for parameter in parameters:
        if not isinstance(parameter, (FlatParameter, ShardedTensor)):
            continue
        for piece in holding_of(parameter).pieces:
            others.update(source.values(piece.fqn))
            for key, shape in source.tensors(piece.fqn).items():
                if tuple(shape) != piece.shape:
                    others.add(key)
                else:
                    (keys if piece.shape else scalars).add(key)
    return keys | (scalars - others - _SCALAR_KEYS)


def _local_state(
    holding: Holding,
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    source: StateSource,
    elementwise: set[str],
) -> dict[str, Any]:
    """The state of one optimizer parameter, put together from its original parameters."""
    whole_keys = optimizer.whole_keys if isinstance(optimizer, ShardedOptimizer) else frozenset()
    part_keys = optimizer.part_keys if isinstance(optimizer, ShardedOptimizer) else frozenset()
    state: dict[str, Any] = {}
    if whole_keys or part_keys:
        state.update({"whole": {}, "parts": {}})
    device = holding.data.device
    for piece in holding.pieces:
        name = piece.fqn
        for key in source.tensors(name):
            if key in whole_keys:
                state["whole"].setdefault(name, {})[key] = source.whole(name, key).to(device, copy=True)
            elif key in part_keys:
                state["parts"].setdefault(name, {})[key] = source.part(name, key, piece).to(device, copy=True)
            elif key in elementwise:
                part = source.part(name, key, piece)
                if key not in state:
                    state[key] = _empty_like(holding, part.dtype)
                piece.of(holding.local(state[key])).copy_(part)
            elif key not in state:
                state[key] = placed(key, source.whole(name, key), device, group)
        for key, value in source.values(name).items():
            state.setdefault(key, value)
    return state


def _empty_like(holding: Holding, dtype: torch.dtype) -> Tensor:
    """Zeros in the form that an optimizer keeps beside this parameter."""
    local = torch.zeros_like(holding.data, dtype=dtype)
    return ShardedTensor(local, holding.param.spec) if isinstance(holding.param, ShardedTensor) else local


def _part(value: Tensor, piece: Piece) -> Tensor:
    """This rank's elements, 1-D, of a whole tensor or of one that is sharded alike."""
    if isinstance(value, ShardedTensor):
        span = value.spec.span
        if (span.start, span.end) != (piece.start, piece.end) and piece.end > piece.start:
            raise StateError(
                "A sharded optimizer state was saved with other shards.",
                parameter=piece.fqn,
                expected=f"elements [{piece.start}, {piece.end})",
                got=f"elements [{span.start}, {span.end})",
                remedy="load a full state dict, or let torch.distributed.checkpoint move the parts",
            )
        return value.local
    return piece.cut(value.detach())


def _load_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], names: Names) -> None:
    """Settings of each group; groups are matched by position and must hold the same names."""
    if len(groups) != len(optimizer.param_groups):
        raise StateError(
            "The optimizer has another number of parameter groups than the saved one.",
            expected=len(groups),
            got=len(optimizer.param_groups),
            remedy="build the optimizer with the same groups",
        )
    for own, saved in zip(optimizer.param_groups, groups, strict=True):
        have = {name for parameter in own["params"] for name in names.of(parameter)}
        if have != set(saved["params"]):
            raise StateError(
                "A parameter group holds other parameters than the saved one.",
                expected=sorted(set(saved["params"]) - have)[:5],
                got=sorted(have - set(saved["params"]))[:5],
                remedy="build the optimizer with the same groups",
            )
        for key, value in saved.items():
            if key != "params":
                own[key] = value
