"""State dicts of the model: full (assembled), sharded (this rank's parts, no communication), local (raw shards).

Names are the author's: tied parameters appear under every name, buffers that are not persistent not at all, the
order is ``nn.Module.state_dict``'s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _IncompatibleKeys

from fsdp_core.comm.wire import Label
from fsdp_core.errors import StateError
from fsdp_core.handle.sharded_tensor import ShardedTensor
from fsdp_core.runtime.context import Context
from fsdp_core.runtime.find import contexts_in
from fsdp_core.runtime.names import TransparentWrapper, join, unwrapped, walk
from fsdp_core.state.full_parameters import gather_flat, whole_views

_LABEL = Label(-1, "state", "state dict")
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

    def show(name: str, value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            return _whole_of(name, value, whole) if kind == "full" else value.detach()
        if isinstance(value, Tensor):
            return value.detach().cpu() if offload_to_cpu else value.detach()
        return value

    return _as_modules_save(model, show)


def _whole_of(name: str, value: ShardedTensor, whole: dict[int, Tensor]) -> Tensor:
    found = whole.get(id(value.local))
    if found is None:
        raise StateError(
            "A module saves something computed from a sharded parameter, of which only a part is here.",
            parameter=value.spec.fqn,
            expected="parameters as they are, or values that are whole",
            got=f"{name} = {value!r}",
            remedy="compute it from the full state dict, or take the module's state_dict inside "
            "`with fsdp_core.full_parameters(model):`",
        )
    return found


def _as_modules_save(model: nn.Module, show: Callable[[str, Any], Any]) -> dict[str, Any]:
    """What each module puts into its state dict, as ``nn.Module.state_dict`` asks for it. ``show`` makes of a name and
    a parameter, sharded, or anything else that modules save, what is to be there."""
    state: dict[str, Any] = OrderedDict()
    state._metadata = OrderedDict()  # type: ignore[attr-defined]  # versions of modules

    def save(module: nn.Module, name: str) -> None:
        nonlocal state
        prefix, version = join(name, ""), {"version": module._version}
        is_transparent = isinstance(module, TransparentWrapper)
        if not is_transparent:
            state._metadata[name] = version  # type: ignore[attr-defined]
            for hook in module._state_dict_pre_hooks.values():
                hook(module, prefix, True)
            own: dict[str, Any] = OrderedDict()
            module._save_to_state_dict(own, prefix, True)
            state.update((key, show(key, value)) for key, value in own.items())
        for key, child in module._modules.items():
            if child is not None:
                save(child, name if is_transparent and key == "module" else join(name, key))
        for hook in module._state_dict_hooks.values():
            changed = hook(module, state, prefix, version)
            state = state if changed is None else changed

    save(model, "")
    return state


def _gather_all(contexts: list[Context], is_kept: bool, offload_to_cpu: bool) -> dict[int, Tensor]:
    """Whole parameters by id of this rank's part, gathered unit by unit; every rank takes part."""
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
                whole[id(parameter.local)] = view.clone(memory_format=torch.preserve_format)
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


def load_model_state(model: nn.Module, state: Mapping[str, Any], strict: bool) -> Any:
    """See ``fsdp_core.load_state_dict``."""
    contexts = contexts_in(model)
    for context in contexts:
        context.settle()
    error: Exception | None = None
    try:
        if any(isinstance(value, dict) and "shard_index" in value for value in state.values()):
            state = _from_local(model, contexts, state)
        if _reads_plainly(model):
            _raise_for(model, *_differences(model, state), strict)
    except (StateError, RuntimeError) as failed:
        error = failed
    _agree(contexts, error)  # before anything has been changed
    found = _as_modules_load(model, state)
    try:
        _raise_for(model, *found, strict)
    except RuntimeError as failed:
        error = failed
    _agree(contexts, error)
    missing, unexpected, _ = found
    return _IncompatibleKeys(missing, unexpected)


def _agree(contexts: Sequence[Context], error: Exception | None) -> None:
    """A rank whose part of the state does not fit stops all ranks."""
    wire = contexts[0].root.groups.world
    failed = torch.tensor([int(error is not None)], dtype=torch.int32, device=wire.device)
    wire.all_reduce(failed, _LABEL, "max").wait()
    if error is not None:
        raise error
    if failed.item():
        raise StateError(
            "A state dict cannot be loaded on another rank.",
            expected="a state dict that fits on every rank (of the full kind: the same one)",
            got="one that fits here only",
            remedy="see that rank's message",
        )


def _raise_for(model: nn.Module, missing: list[str], unexpected: list[str], errors: list[str], strict: bool) -> None:
    """As ``nn.Module.load_state_dict`` says it."""
    lines = list(errors)
    for what, names in (("Unexpected", unexpected), ("Missing", missing)):
        if strict and names:
            lines.insert(0, "{} key(s) in state_dict: {}. ".format(what, ", ".join(f'"{name}"' for name in names)))
    if lines:
        title = type(unwrapped(model)).__name__
        raise RuntimeError("Error(s) in loading state_dict for {}:\n\t{}".format(title, "\n\t".join(lines)))


def _reads_plainly(model: nn.Module) -> bool:
    """Do names and shapes alone say what loading will do? Not if modules rename or convert what they find."""
    plain = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)
    return not any(m._load_state_dict_pre_hooks or type(m)._load_from_state_dict not in plain for m in model.modules())


def _differences(model: nn.Module, state: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Missing and unexpected names, and what else does not fit."""
    entries = {entry.name: entry for entry in state_entries(model)}
    missing = [name for name in entries if name not in state and not _is_derived(entries[name], state)]
    unexpected = [name for name in state if name not in entries]
    errors = [_misfit(entry, state[name]) for name, entry in entries.items() if name in state]
    return missing, unexpected, [error for error in errors if error is not None]


def _is_derived(entry: StateEntry, state: Mapping[str, Any]) -> bool:
    """Older state dicts lack a batch norm's counter, which it then sets itself."""
    return entry.key == "num_batches_tracked" and isinstance(entry.module, _NormBase)


def _misfit(entry: StateEntry, value: Any) -> str | None:
    if entry.kind == "extra":
        return None
    if not torch.overrides.is_tensor_like(value):
        return (
            f'While copying the parameter named "{entry.name}", expected torch.Tensor or Tensor-like object from '
            f"checkpoint but received {type(value)}"
        )
    own = entry.value
    if value.shape != own.shape and not (own.dim() == 0 and value.shape == (1,)):
        return (
            f"size mismatch for {entry.name}: copying a param with shape {value.shape} from checkpoint, "
            f"the shape in current model is {own.shape}."
        )
    reason = None
    if value.is_meta or value.layout != torch.strided:  # found on every rank, whether it has a part of it or not
        reason = f"a {value.layout} tensor on device {value.device} holds no values that can be copied"
    elif isinstance(value, ShardedTensor) and isinstance(own, ShardedTensor) and value.spec.span != own.spec.span:
        reason = "this rank has another part of it in the checkpoint than in the model: load the full kind"
    if reason is None:
        return None
    return (
        f'While copying the parameter named "{entry.name}", whose dimensions in the model are {own.size()} and whose '
        f"dimensions in the checkpoint are {value.size()}, an exception occurred : {(reason,)}."
    )


def _as_modules_load(model: nn.Module, state: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Every module takes what is its own, in its own way, as in ``nn.Module.load_state_dict``."""
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    metadata = getattr(state, "_metadata", None) or {}

    def load(module: nn.Module, name: str, own: dict[str, Any]) -> None:
        if not isinstance(module, TransparentWrapper):
            version = metadata.get(name, {})
            module._load_from_state_dict(own, join(name, ""), version, True, missing, unexpected, errors)
        for key, child in module._modules.items():
            if child is None:
                continue
            if isinstance(module, TransparentWrapper) and key == "module":
                load(child, name, own)
                continue
            below = join(name, key)
            start = join(below, "")
            load(child, below, {key: value for key, value in own.items() if key.startswith(start)})
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, _IncompatibleKeys(missing, unexpected))

    load(model, "", OrderedDict(state))
    return missing, unexpected, errors


def _from_local(model: nn.Module, contexts: list[Context], state: Mapping[str, Any]) -> dict[str, Any]:
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
