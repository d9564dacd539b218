"""Deferred initialisation: build a model without its memory, give it memory one unit at a time.

    with seeded_init(7):
        model = deferred_init(GPT, config)      # no parameter has memory; every operation on them is written down
    materialize(model, "cuda")                  # or fully_shard(model, ...): unit by unit, straight into the shards

For an engine: ``stream_unit(tensors, device)`` yields (deferred tensor, real tensor) as each becomes final, so that
it can be copied into a shard and dropped before the next; ``materialize_unit`` is the same as a dictionary.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from fsdp_core.errors import InitError
from fsdp_core.init.fake_tensor import DeferredTensor, user_attributes
from fsdp_core.init.recorder import live_recorder
from fsdp_core.init.recording import Constant, Recording, Slot, TensorRef, map_leaves
from fsdp_core.init.replay import replay, view
from fsdp_core.init.seeding import SeedSource, current_source, rejection_loops_seeded

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)

Device = torch.device | str | int | None


def deferred_init(build: Callable[P, M], *args: P.args, **kwargs: P.kwargs) -> M:
    """Call ``build(*args, **kwargs)`` so that the module it returns has no memory yet.

    Parameters and buffers say their shape, dtype and device; every operation that made or wrote them is recorded.
    Steps that ask for values get the exact ones. Seeds come from the enclosing ``seeded_init``; without one, from one
    draw of torch's default generator (so ``torch.manual_seed`` decides, and ranks must agree on it).

    Returns:
        The module. ``materialize`` or ``fully_shard`` give it memory.

    Raises:
        InitError: an operation has no exact replay (see ``recorder``); it names the operation and the parameter.
        TypeError: ``build`` returned something else than a module.
    """
    recorder = live_recorder()
    source = current_source() or SeedSource(int(torch.empty((), dtype=torch.int64).random_().item()))
    composites = rejection_loops_seeded(recorder.record_composite, fallback=source)
    try:
        with _labels(), composites, recorder.open(source):
            module = build(*args, **kwargs)
    except ValueError as error:
        if "read-only" in str(error) and recorder.read_only_arrays:
            raise InitError(
                "A numpy array made from a deferred tensor was written to: the write would be lost",
                parameter=", ".join(str(label) for label in recorder.read_only_arrays),
                remedy="fill an array of your own and copy it: parameter.copy_(torch.from_numpy(array))",
            ) from error
        raise
    except RuntimeError as error:
        if "Uninitialized" in str(error) and "DeferredTensor" in str(error):
            raise InitError(
                f"A lazy module has no shapes to record yet: {error}",
                remedy="give the module its input size, or build it eagerly and run one batch before sharding",
            ) from error
        raise
    if not isinstance(module, nn.Module):
        raise TypeError(f"deferred_init expects a callable that returns a torch.nn.Module, got {type(module).__name__}")
    return module


def is_deferred(target: nn.Module | Tensor) -> bool:
    """True for a deferred tensor, and for a module that has at least one among its parameters and buffers."""
    if isinstance(target, Tensor):
        return isinstance(target, DeferredTensor)
    return any(isinstance(t, DeferredTensor) for t in _registered(target))


def materialize(module: M, device: Device = None, *, only: nn.Module | Iterable[Tensor] | None = None) -> M:
    """Give a deferred module its memory, in place.

    Args:
        device: where; ``None`` keeps the device each tensor was built for. Real tensors of ``module`` move there too.
        only: a submodule, or deferred tensors of ``module``; the rest stays deferred.

    Returns:
        ``module``. Tied weights stay tied; attributes and hooks of parameters are kept; nothing has an autograd graph.

    Raises:
        InitError: a recorded step cannot be replayed exactly on ``device``.
    """
    names = _names_of(module)
    if only is None or isinstance(only, nn.Module):
        wanted = [t for t in _found(module if only is None else only) if isinstance(t, DeferredTensor)]
    else:
        wanted = _checked(only)
    deferred = {id(t): t for t in wanted}
    real = {id(t): _dressed(deferred[id(t)], value) for t, value in stream_unit(wanted, device, names=names)}
    if device is not None and only is None:
        _move_real(module, torch.device(device), names)
    for part in module.modules():
        _replace_in(part, real)
    return module


def _move_real(module: nn.Module, device: torch.device, names: dict[int, str]) -> None:
    for tensor in _registered(module):
        if tensor.is_meta:
            raise InitError(
                "A tensor on the meta device has no values and no recording of them",
                parameter=names[id(tensor)],
                remedy="build the module inside deferred_init, or call to_empty() and initialise it there",
            )
        if not isinstance(tensor, DeferredTensor) and tensor.device != device:
            tensor.data = tensor.data.to(device)


def materialize_rest(module: nn.Module, parameters: Iterable[Tensor], device: Device = None) -> None:
    """Materialise everything deferred in ``module`` but ``parameters``: buffers, plain attributes, ignored modules."""
    kept = {id(parameter) for parameter in parameters}
    rest = {id(t): t for t in _found(module) if isinstance(t, DeferredTensor) and id(t) not in kept}
    if rest:
        materialize(module, device, only=rest.values())


def materialize_unit(tensors: Iterable[Tensor], device: Device = None) -> dict[Tensor, Tensor]:
    """Real tensors for some deferred ones, without touching any module. Keys are compared by identity.

    Tensors that alias each other in the build share memory in the result. Plain tensors come back, without autograd.
    """
    return dict(stream_unit(tensors, device))


def stream_unit(
    tensors: Iterable[Tensor], device: Device = None, *, names: dict[int, str] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (deferred, real) as each tensor becomes final; whoever drops the real one frees its memory.

    Args:
        names: ``id(tensor)`` to a name, for error messages.

    Raises:
        InitError: see ``materialize``.
    """
    by_recording: dict[Recording, dict[Slot, dict[int, DeferredTensor]]] = {}
    for tensor in _checked(tensors):
        by_recording.setdefault(tensor.recorder.recording, {}).setdefault(tensor.slot, {})[id(tensor)] = tensor
    target = torch.device(device) if device is not None else None
    for recording, by_slot in by_recording.items():
        labels = {slot: _label(slot, group, names or {}) for slot, group in by_slot.items()}
        _check_host_draws(recording, target, labels)
        missing = dict(labels)
        for slot, group in by_slot.items():
            alive = _storage_alive(slot, target)
            if alive is not None:
                del missing[slot]
                yield from _deliver(group, alive)
        for slot, storage in replay(recording, missing, target):
            yield from _deliver(by_slot[slot], storage)
            del storage  # before the next one is made


def recording_digest(module: nn.Module) -> int:
    """A 63-bit number that two ranks share if and only if their recordings give ``module`` the same values.

    Covers operations, their arguments, shapes, seeds, and the values of constants that lie dense on the CPU.
    """
    digest = hashlib.blake2b(digest_size=8)
    found = [t for t in _registered(module) if isinstance(t, DeferredTensor)]
    if found:
        recording = found[0].recorder.recording
        order: dict[Slot, int] = {}
        for index in recording.plan([t.slot for t in found]):
            node = recording.nodes[index]
            for slot in node.writes:
                order.setdefault(slot, len(order))
            shapes = [(ref.size, str(ref.dtype)) for _, ref in node.made]
            written = [order[slot] for slot in node.writes]
            plain = map_leaves(lambda leaf: _digested(leaf, order), (node.args, node.kwargs))
            digest.update(repr((node.name, node.seed, shapes, plain, written)).encode())
        digest.update(repr([(order.get(t.slot, -1), tuple(t.shape), str(t.dtype)) for t in found]).encode())
    return int.from_bytes(digest.digest(), "little") >> 1


def _digested(leaf: Any, order: dict[Slot, int]) -> Any:
    """A leaf of an operation's arguments in a form that is equal where ranks agree."""
    if isinstance(leaf, TensorRef):
        return (order.get(leaf.slot), leaf.size, leaf.stride, leaf.offset)
    if isinstance(leaf, Constant):
        return leaf.digest
    return leaf if isinstance(leaf, (bool, int, float, str, torch.dtype)) else None


# -- delivery --------------------------------------------------------------------------------------------------------


def _checked(tensors: Iterable[Tensor]) -> list[DeferredTensor]:
    checked = []
    for tensor in tensors:
        if not isinstance(tensor, DeferredTensor):
            raise InitError(
                "Only deferred tensors can be materialised",
                expected="a tensor made inside deferred_init",
                got=f"a {type(tensor).__name__} on {tensor.device}",
                remedy="build the module with deferred_init(build, ...)",
            )
        checked.append(tensor)
    return checked


def _deliver(group: dict[int, DeferredTensor], storage: torch.UntypedStorage) -> Iterator[tuple[Tensor, Tensor]]:
    for tensor in group.values():
        real = view(tensor.ref(), storage)
        tensor.is_delivered = True
        tensor.slot.delivered.append(weakref.ref(real))
        yield tensor, real


def _storage_alive(slot: Slot, target: torch.device | None) -> torch.UntypedStorage | None:
    """The memory an earlier call gave this slot, if somebody still uses it there: aliases stay aliases."""
    for reference in slot.delivered:
        real = reference()
        if real is not None and (target is None or target == real.device):
            return real.untyped_storage()
    slot.delivered.clear()
    return None


def _check_host_draws(recording: Recording, target: torch.device | None, labels: dict[Slot, str]) -> None:
    """Values drawn while recording came from one device type; another one draws other bits."""
    builds = {slot.build for slot in labels}
    for draw in recording.host_draws:
        if target is not None and draw.build in builds and target.type not in (draw.device_type, "meta"):
            raise InitError(
                f"The build used random values while it was recorded ({draw.operation}), drawn on {draw.device_type}",
                parameter=draw.parameter or next(iter(labels.values()), None),
                expected=f"materialisation on {draw.device_type}",
                got=str(target),
                remedy=f"build under torch.device('{target.type}'), or materialise on {draw.device_type}",
            )


def _label(slot: Slot, group: dict[int, DeferredTensor], names: dict[int, str]) -> str:
    for key in group:
        if key in names:
            return names[key]
    return slot.label or f"a {tuple(next(iter(group.values())).shape)} tensor"


def _dressed(deferred: DeferredTensor, real: Tensor) -> Tensor:
    """The real tensor as a parameter if the deferred one was, with the attributes and hooks it carried."""
    attributes = user_attributes(deferred)
    if attributes.pop("_is_param", False):
        real = nn.Parameter(real, requires_grad=deferred.requires_grad)
    elif deferred.requires_grad and deferred.is_leaf:
        real.requires_grad_()
    for name, value in attributes.items():
        setattr(real, name, value)
    for hook in (deferred._backward_hooks or {}).values():
        real.register_hook(hook)
    for hook in (deferred._post_accumulate_grad_hooks or {}).values():
        real.register_post_accumulate_grad_hook(hook)
    deferred.slot.delivered.append(weakref.ref(real))
    return real


# -- where tensors sit in modules ------------------------------------------------------------------------------------

_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}


def _registered(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, each once."""
    seen: set[int] = set()
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _found(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors kept in plain attributes (lists, tuples and dicts opened)."""
    yield from _registered(module)
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in _MODULE_INTERNALS:
                yield from _inside(value)


def _inside(value: Any) -> Iterator[Tensor]:
    if isinstance(value, DeferredTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _inside(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _inside(item)


def _replace_in(part: nn.Module, real: dict[int, Tensor]) -> None:
    tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
    for table in tables:
        for name, tensor in table.items():
            if id(tensor) in real:
                table[name] = real[id(tensor)]
    for name, value in list(vars(part).items()):
        if name not in _MODULE_INTERNALS and (changed := _replaced(value, real)) is not value:
            vars(part)[name] = changed


def _replaced(value: Any, real: dict[int, Tensor]) -> Any:
    """``value`` itself where nothing in it changes; lists and dicts change in place."""
    if isinstance(value, Tensor):
        return real.get(id(value), value)
    if isinstance(value, weakref.ref):
        target = value()
        return weakref.ref(real[id(target)]) if id(target) in real else value
    if isinstance(value, list):
        for position, item in enumerate(value):
            if (changed := _replaced(item, real)) is not item:
                value[position] = changed
    elif isinstance(value, dict):
        for key, item in value.items():
            if (changed := _replaced(item, real)) is not item:
                value[key] = changed
    elif type(value) is tuple:
        items = tuple(_replaced(item, real) for item in value)
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    return value


# -- names -----------------------------------------------------------------------------------------------------------


def _names_of(module: nn.Module) -> dict[int, str]:
    """``id(tensor)`` to fully qualified name, the first one for tied tensors."""
    names: dict[int, str] = {}
    for prefix, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            names.setdefault(id(tensor), f"{prefix}.{name}" if prefix else name)
    return names


@contextmanager
def _labels() -> Iterator[None]:
    """During the build, note under which attribute each deferred tensor was first registered."""

    def label(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if isinstance(tensor, DeferredTensor) and tensor.slot.label is None:
            tensor.slot.label = f"{type(module).__name__}.{name}"

    handles = [
        nn_module.register_module_parameter_registration_hook(label),
        nn_module.register_module_buffer_registration_hook(label),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
