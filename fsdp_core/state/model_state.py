"""State dicts of the model: full (assembled), sharded (this rank's parts, no communication), local (raw shards).

Names are the author's: tied parameters appear under every name, buffers that are not persistent not at all, the
order is ``nn.Module.state_dict``'s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _IncompatibleKeys

from fsdp_core.errors import StateError
from fsdp_core.handle.sharded_tensor import ShardedTensor
from fsdp_core.runtime.context import Context
from fsdp_core.runtime.find import contexts_in
from fsdp_core.runtime.names import TransparentWrapper, join, unwrapped, walk
from fsdp_core.state.full_parameters import gather_flat, whole_views

StateKind = Literal["full", "sharded", "local"]


@dataclass(frozen=True)
class StateEntry:
    """One item of a state dict."""

    name: str
    module: nn.Module
    key: str
    value: Any
    kind: Literal["parameter", "buffer", "extra"]


def state_entries(model: nn.Module) -> Iterator[StateEntry]:
    """All entries in the order of ``nn.Module.state_dict``."""
    for prefix, module in walk(model):
        if isinstance(module, TransparentWrapper):
            continue
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield StateEntry(join(prefix, key), module, key, parameter, "parameter")
        for key, value in module._buffers.items():
            if value is not None and key not in module._non_persistent_buffers_set:
                yield StateEntry(join(prefix, key), module, key, value, "buffer")
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield StateEntry(join(prefix, _EXTRA_STATE_KEY_SUFFIX), module, "", None, "extra")


def model_state_dict(model: nn.Module, kind: StateKind, *, rank0_only: bool, offload_to_cpu: bool) -> dict[str, Any]:
    """See ``fsdp_core.state_dict``."""
    if kind not in ("full", "sharded", "local"):
        raise StateError("The kind of a state dict is not understood.", expected="full, sharded or local", got=kind)
    contexts = contexts_in(model)
    if kind == "local":
        return _local_state(model, contexts)
    is_kept = not rank0_only or contexts[0].root.groups.rank == contexts[0].root.groups.table.rows[0][0]
    whole = _gather_all(contexts, is_kept, offload_to_cpu) if kind == "full" else {}
    if not is_kept:
        return {}
    state: dict[str, Any] = OrderedDict()
    for entry in state_entries(model):
        if entry.kind == "extra":
            state[entry.name] = entry.module.get_extra_state()
        elif isinstance(entry.value, ShardedTensor):
            state[entry.name] = whole[id(entry.value)] if kind == "full" else entry.value.detach()
        else:
            value = entry.value.detach()
            state[entry.name] = value.cpu() if offload_to_cpu else value
    return state


def _gather_all(contexts: list[Context], is_kept: bool, offload_to_cpu: bool) -> dict[int, Tensor]:
    """Whole parameters by id of the sharded one, gathered unit by unit; every rank takes part."""
    whole: dict[int, Tensor] = {}
    for context in contexts:
        context.settle()
        for unit, handle in context.each_handle():
            flat = gather_flat(handle, handle.sharded, unit.state_label)
            if not is_kept:
                continue
            if offload_to_cpu:
                flat = flat.cpu()
            for parameter, view in zip(handle.params, whole_views(handle, flat), strict=True):
                whole[id(parameter)] = view.clone(memory_format=torch.preserve_format)
        context.settle()
    return whole


def _local_state(model: nn.Module, contexts: list[Context]) -> dict[str, Any]:
    state: dict[str, Any] = OrderedDict()
    for context in contexts:
        for unit, handle in context.each_handle():
            state[f"{unit.name}/{handle.params[0].spec.fqn}"] = {
                "flat": handle.sharded.detach().clone(),
                "num_shards": handle.layout.num_shards,
                "shard_index": handle.wire.group_rank,
                "segments": [(s.fqn, tuple(s.shape), s.stride, s.start, s.end) for s in handle.layout.segments],
            }
    for entry in state_entries(model):
        if entry.kind == "buffer" or (entry.kind == "parameter" and not isinstance(entry.value, ShardedTensor)):
            state[entry.name] = entry.value.detach().clone()
    return state


def load_model_state(model: nn.Module, state: dict[str, Any], strict: bool) -> Any:
    """See ``fsdp_core.load_state_dict``."""
    contexts = contexts_in(model)
    for context in contexts:
        context.settle()
    if any(isinstance(value, dict) and "shard_index" in value for value in state.values()):
        state = _from_local(model, contexts, state)
    entries = {entry.name: entry for entry in state_entries(model)}
    missing = [name for name in entries if name not in state]
    unexpected = [name for name in state if name not in entries]
    errors: list[str] = []
    if strict and missing:
        errors.append("Missing key(s) in state_dict: {}. ".format(", ".join(f'"{name}"' for name in missing)))
    if strict and unexpected:
        errors.append("Unexpected key(s) in state_dict: {}. ".format(", ".join(f'"{name}"' for name in unexpected)))
    fitting = {}
    for name, entry in entries.items():
        if name not in state:
            continue
        if entry.kind != "extra" and state[name].shape != entry.value.shape:
            errors.append(
                f"size mismatch for {name}: copying a param with shape {state[name].shape} from checkpoint, "
                f"the shape in current model is {entry.value.shape}."
            )
            continue
        fitting[name] = entry
    if errors:  # as torch says it, before anything has been changed
        title = type(unwrapped(model)).__name__
        raise RuntimeError("Error(s) in loading state_dict for {}:\n\t{}".format(title, "\n\t".join(errors)))
    with torch.no_grad():
        for name, entry in fitting.items():
            _load_entry(entry, state[name])
    return _IncompatibleKeys(missing, unexpected)


def _load_entry(entry: StateEntry, value: Any) -> None:
    if entry.kind == "extra":
        entry.module.set_extra_state(value)
    elif isinstance(entry.value, ShardedTensor) and not isinstance(value, ShardedTensor):
        handle = entry.value.owner
        index = next(i for i, parameter in enumerate(handle.params) if parameter is entry.value)
        handle.write_original(index, value)
    else:
        entry.value.copy_(value)


def _from_local(model: nn.Module, contexts: list[Context], state: dict[str, Any]) -> dict[str, Any]:
    """A local state dict fits only the same units, F and rank; anything else needs the full or sharded kind."""
    result = {name: value for name, value in state.items() if not (isinstance(value, dict) and "shard_index" in value)}
    names: dict[int, list[str]] = {}
    for entry in state_entries(model):
        names.setdefault(id(entry.value), []).append(entry.name)
    for context in contexts:
        for unit, handle in context.each_handle():
            saved = state.get(f"{unit.name}/{handle.params[0].spec.fqn}")
            segments = [(s.fqn, tuple(s.shape), s.stride, s.start, s.end) for s in handle.layout.segments]
            if saved is None or saved["num_shards"] != handle.layout.num_shards or saved["segments"] != segments:
                raise StateError(
                    "A local state dict was saved from another layout.",
                    unit=unit.name,
                    expected=f"units and F = {handle.layout.num_shards} as in this model",
                    got="other units, shapes or F",
                    remedy="save with kind='full' or kind='sharded'",
                )
            if saved["shard_index"] != handle.wire.group_rank:
                raise StateError(
                    "A local state dict belongs to another rank.",
                    unit=unit.name,
                    expected=f"shard {handle.wire.group_rank}",
                    got=f"shard {saved['shard_index']}",
                )
            for parameter in handle.params:
                span = parameter.spec.span
                local = saved["flat"][span.shard_start : span.shard_end].to(handle.sharded.device)
                for name in names[id(parameter)]:
                    result[name] = ShardedTensor(local, parameter.spec)
    return result
