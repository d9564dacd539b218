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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fsdp_core.errors import StateError
from fsdp_core.handle.flat_param_handle import FlatParamHandle
from fsdp_core.handle.shard_gradient import FlatParameter
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
class _Names:
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
class _Entry:
    """One value of the state, as it belongs to one original parameter. ``is_part``: it is 1-D and holds the elements
    of the parameter that this rank holds."""

    piece: Piece
    key: str
    value: Any
    is_part: bool


def _names(model: nn.Module) -> _Names:
    by_id: dict[int, str] = {}
    for entry in state_entries(model):
        if entry.kind == "parameter":
            by_id.setdefault(id(entry.value), entry.name)
    return _Names(by_id)


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
    contexts, names = contexts_in(model), _names(model)
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
        state.update(_state_of_handle(unit, handle, [e for h in own for e in _entries(h, optimizer)], kind))
    return state


def _entries(holding: Holding, optimizer: torch.optim.Optimizer) -> Iterator[_Entry]:
    for key, value in optimizer.state[holding.param].items():
        if isinstance(optimizer, ShardedOptimizer) and key in ("whole", "parts"):
            for piece in holding.pieces:
                for inner, tensor in value.get(piece.fqn, {}).items():
                    yield _Entry(piece, inner, tensor, key == "parts")
            continue
        is_part = _is_elementwise(value, holding.param)
        local = holding.local(value) if is_part else value
        for piece in holding.pieces:
            yield _Entry(piece, key, piece.of(local) if is_part else value, is_part)


def _is_elementwise(value: Any, parameter: Tensor) -> bool:
    if isinstance(value, ShardedTensor):
        return True
    is_flat = isinstance(parameter, FlatParameter) and isinstance(value, Tensor)
    return is_flat and value.dim() == 1 and value.numel() == parameter.numel()


def _state_of_handle(
    unit: Unit, handle: FlatParamHandle, entries: Sequence[_Entry], kind: str
) -> dict[str, dict[str, Any]]:
    """Per name what the optimizer keeps; element-wise values of one key are gathered together."""
    indices = {parameter.spec.fqn: index for index, parameter in enumerate(handle.params)}
    found: dict[str, dict[str, Any]] = {entry.piece.fqn: {} for entry in entries}
    parts: dict[str, list[_Entry]] = {}
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


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """See ``fsdp_core.load_optim_state_dict``."""
    names = _names(model)
    by_name: Mapping[str, dict[str, Any]] = saved["state"]
    _load_groups(optimizer, saved["param_groups"], names)
    if isinstance(optimizer, WholeParameterOptimizer):
        optimizer.load_owned_state(dict(by_name))
        return
    elementwise = _elementwise_keys(optimizer, by_name)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            present = [name for name in names.of(parameter) if by_name.get(name)]
            if not present:
                optimizer.state.pop(parameter, None)
            elif isinstance(parameter, (FlatParameter, ShardedTensor)):
                optimizer.state[parameter] = _local_state(holding_of(parameter), optimizer, by_name, elementwise)
            else:
                optimizer.state[parameter] = {key: _copy(value) for key, value in by_name[present[0]].items()}


def _elementwise_keys(optimizer: torch.optim.Optimizer, by_name: Mapping[str, dict[str, Any]]) -> set[str]:
    """Keys whose values have one element per parameter element. A 0-dim value of a 0-dim parameter says nothing by
    itself: the other parameters decide, and without any the key's name."""
    keys: set[str] = set()
    scalars: set[str] = set()
    others: set[str] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not isinstance(parameter, (FlatParameter, ShardedTensor)):
                continue
            for piece in holding_of(parameter).pieces:
                for key, value in by_name.get(piece.fqn, {}).items():
                    if not isinstance(value, Tensor) or tuple(value.shape) != piece.shape:
                        others.add(key)
                    else:
                        (keys if piece.shape else scalars).add(key)
    return keys | (scalars - others - _SCALAR_KEYS)


def _local_state(
    holding: Holding,
    optimizer: torch.optim.Optimizer,
    by_name: Mapping[str, dict[str, Any]],
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
        for key, value in by_name.get(piece.fqn, {}).items():
            if key in whole_keys:
                state["whole"].setdefault(piece.fqn, {})[key] = value.detach().to(device, copy=True)
            elif key in part_keys:
                state["parts"].setdefault(piece.fqn, {})[key] = _part(value, piece).to(device, copy=True)
            elif key in elementwise:
                if key not in state:
                    state[key] = _empty_like(holding, value.dtype)
                piece.of(holding.local(state[key])).copy_(_part(value, piece))
            else:
                state.setdefault(key, _copy(value))
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


def _load_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], names: _Names) -> None:
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
