"""State dicts of the optimizer in original names and shapes, whichever face it steps on.

The form is torch's with names for numbers: ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``.
Tensors with one element per parameter element (moments) are assembled or cut like the parameter; all other values
(step counts, scalars) are kept as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fsdp_core.errors import StateError
from fsdp_core.handle.flat_param_handle import FlatParamHandle
from fsdp_core.handle.sharded_tensor import ShardedTensor, local_part
from fsdp_core.handle.shard_gradient import FlatParameter
from fsdp_core.runtime.context import Context
from fsdp_core.runtime.find import contexts_in
from fsdp_core.runtime.unit import Unit
from fsdp_core.state.full_parameters import gather_flat, whole_views
from fsdp_core.state.model_state import state_entries


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


def _names(model: nn.Module) -> _Names:
    by_id: dict[int, str] = {}
    for entry in state_entries(model):
        if entry.kind == "parameter":
            by_id.setdefault(id(entry.value), entry.name)
    return _Names(by_id)


def _handles(contexts: list[Context]) -> Iterator[tuple[Unit, FlatParamHandle]]:
    for context in contexts:
        yield from context.each_handle()


def optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, kind: Literal["full", "sharded"], rank0_only: bool
) -> dict[str, Any]:
    """See ``fsdp_core.optim_state_dict``."""
    if kind not in ("full", "sharded"):
        raise StateError("The kind of an optimizer state dict is not understood.", expected="full or sharded", got=kind)
    contexts, names = contexts_in(model), _names(model)
    state: dict[str, dict[str, Any]] = {}
    for unit, handle in _handles(contexts):
        for key, value in _state_of_handle(unit, handle, optimizer, kind).items():
            state[key] = value
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


def _state_of_handle(
    unit: Unit, handle: FlatParamHandle, optimizer: torch.optim.Optimizer, kind: str
) -> dict[str, dict[str, Any]]:
    """Per name what the optimizer keeps; element-wise tensors of one key are gathered together."""
    flat = handle.flat_parameter
    states: list[dict[str, Any]] = (
        [optimizer.state.get(flat, {})] * len(handle.params)
        if flat is not None and flat in optimizer.state
        else [optimizer.state.get(parameter, {}) for parameter in handle.params]
    )
    found: dict[str, dict[str, Any]] = {p.spec.fqn: {} for p, s in zip(handle.params, states, strict=True) if s}
    keys = dict.fromkeys(key for one in states for key in one)
    for key in _agreed_keys(handle, keys):
        shard = _shard_of(handle, states, key)
        whole = None
        if shard is not None and kind == "full":
            whole = whole_views(handle, gather_flat(handle, shard, unit.state_label))
        for index, (parameter, one) in enumerate(zip(handle.params, states, strict=True)):
            if key not in one:
                continue
            value = one[key]
            if shard is None or not _is_elementwise(value, handle):
                value = _copy(value)
            elif whole is not None:
                value = whole[index].clone()
            else:
                span = parameter.spec.span
                value = ShardedTensor(shard[span.shard_start : span.shard_end].clone(), parameter.spec)
            found[parameter.spec.fqn][key] = value
    return found


def _agreed_keys(handle: FlatParamHandle, keys: dict[str, None]) -> list[str]:
    return sorted(keys)


def _is_elementwise(value: Any, handle: FlatParamHandle) -> bool:
    if isinstance(value, ShardedTensor):
        return True
    return (
        handle.flat_parameter is not None
        and isinstance(value, Tensor)
        and value.dim() == 1
        and value.numel() == handle.layout.shard_numel
    )


def _shard_of(handle: FlatParamHandle, states: list[dict[str, Any]], key: str) -> Tensor | None:
    """One [shard_numel] tensor of an element-wise state, ``None`` if the state is of another kind."""
    for one in states:
        value = one.get(key)
        if value is not None and not isinstance(value, ShardedTensor) and _is_elementwise(value, handle):
            return value
    parts = [one.get(key) for one in states]
    some = next((part for part in parts if isinstance(part, ShardedTensor)), None)
    if some is None:
        return None
    shard = torch.zeros(handle.layout.shard_numel, dtype=some.local.dtype, device=some.local.device)
    for parameter, part in zip(handle.params, parts, strict=True):
        if isinstance(part, ShardedTensor):
            span = parameter.spec.span
            shard[span.shard_start : span.shard_end].copy_(part.local)
    return shard


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """See ``fsdp_core.load_optim_state_dict``."""
    contexts, names = contexts_in(model), _names(model)
    by_name = saved["state"]
    handles = {id(p): handle for _, handle in _handles(contexts) for p in handle.params}
    handles.update({id(h.flat_parameter): h for _, h in _handles(contexts) if h.flat_parameter is not None})
    _load_groups(optimizer, saved["param_groups"], names)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            own = names.of(parameter)
            present = [name for name in own if name in by_name]
            if not present:
                optimizer.state.pop(parameter, None)
                continue
            if isinstance(parameter, FlatParameter):
                optimizer.state[parameter] = _flat_state(handles[id(parameter)], by_name, present)
            else:
                optimizer.state[parameter] = {
                    key: _cut(parameter, value) for key, value in by_name[present[0]].items()
                }


def _cut(parameter: Tensor, value: Any) -> Any:
    """One loaded value as the optimizer will keep it."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(parameter, ShardedTensor) and value.shape == parameter.shape and value.dim() == parameter.dim():
        if isinstance(value, ShardedTensor) or value.dim() > 0:
            local = local_part(value.detach(), parameter.spec).to(parameter.local.device, copy=True)
            return ShardedTensor(local, parameter.spec)
    return value.detach().clone()


def _flat_state(handle: FlatParamHandle, by_name: dict[str, Any], present: list[str]) -> dict[str, Any]:
    """Per-name values put back into one 1-D tensor per key."""
    result: dict[str, Any] = {}
    for key, example in by_name[present[0]].items():
        first = handle.params[[p.spec.fqn for p in handle.params].index(present[0])]
        if not isinstance(example, Tensor) or example.shape != first.shape or example.dim() == 0:
            result[key] = _copy(example)
            continue
        flat = torch.zeros(handle.layout.shard_numel, dtype=example.dtype, device=handle.sharded.device)
        for parameter in handle.params:
            value = by_name.get(parameter.spec.fqn, {}).get(key)
            if value is not None:
                span = parameter.spec.span
                flat[span.shard_start : span.shard_end].copy_(local_part(value.detach(), parameter.spec))
        result[key] = flat
    return result


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
