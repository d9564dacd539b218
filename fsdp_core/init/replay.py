"""Replay: run the nodes that some storages need, on real memory, and hand each storage over as soon as it is final.

What lives at one time: storages not yet handed over that a later node of the plan still reads or writes. For one unit
that is at most the unit, plus what it reads from elsewhere; for a whole model it is what eager building would hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fsdp_core.errors import InitError
from fsdp_core.init.recording import Constant, Node, Recording, Slot, TensorRef, map_leaves, tensors_in
from fsdp_core.init.seeding import paused, run_composite, run_seeded


def replay(
    recording: Recording, wanted: Mapping[Slot, str], device: torch.device | None
) -> Iterator[tuple[Slot, torch.UntypedStorage]]:
    """Yield every wanted slot with its real storage, in the order they become final.

    Args:
        wanted: slots, each with the parameter's name for messages.
        device: where to run; ``None`` is where the build believed each tensor to lie.

    Raises:
        InitError: an operation failed on real memory, or a constant was changed since it was recorded.
    """
    plan = recording.plan(wanted)
    last_uses = recording.last_uses(plan)
    memory = _Memory(device)
    for slot in wanted:
        if slot not in last_uses:  # nothing ever wrote it
            memory.allocate(slot, zeroed=True)
            yield slot, memory.storages.pop(slot)
    for index in plan:
        node = recording.nodes[index]
        with _real_world(node.default_dtype):
            _run(node, memory, wanted)
        for slot in dict.fromkeys((*node.reads, *node.writes)):
            if last_uses[slot] == index:
                if slot in wanted:
                    yield slot, memory.storages.pop(slot)  # no name for it here: the receiver alone holds it
                else:
                    del memory.storages[slot]


def view(ref: TensorRef, storage: torch.UntypedStorage) -> Tensor:
    """The real tensor that ``ref`` describes."""
    with _real_world(torch.get_default_dtype()):
        tensor = torch.empty(0, dtype=ref.dtype, device=storage.device)
        tensor = tensor.set_(storage, ref.offset, ref.size, ref.stride)
        if ref.is_conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if ref.is_neg else tensor


class _Memory:
    """Real storages of the slots in use."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self.storages: dict[Slot, torch.UntypedStorage] = {}

    def device_for(self, recorded: torch.device) -> torch.device:
        return recorded if self._device is None or recorded.type == "meta" else self._device

    def allocate(self, slot: Slot, zeroed: bool) -> torch.UntypedStorage:
        make = torch.zeros if zeroed else torch.empty
        storage = make(slot.nbytes, dtype=torch.uint8, device=self.device_for(slot.device)).untyped_storage()
        self.storages[slot] = storage
        return storage

    def tensor(self, leaf: Any) -> Any:
        """An argument for the real operation: references and constants become tensors."""
        if isinstance(leaf, TensorRef):
            storage = self.storages.get(leaf.slot)
            return view(leaf, self.allocate(leaf.slot, zeroed=False) if storage is None else storage)
        if isinstance(leaf, Constant):
            tensor = leaf.tensor()
            return tensor.to(self.device_for(tensor.device))
        return leaf

    def keep(self, ref: TensorRef, made: Tensor, inputs: Sequence[Tensor]) -> None:
        """Bind a slot to the storage that a real operation made, in the geometry that was recorded."""
        as_recorded = (
            tuple(made.shape) == ref.size
            and made.stride() == ref.stride
            and made.storage_offset() == ref.offset
            and made.untyped_storage().nbytes() >= ref.slot.nbytes
            and (made.is_conj(), made.is_neg()) == (ref.is_conj, ref.is_neg)
            and not any(made.untyped_storage()._cdata == other.untyped_storage()._cdata for other in inputs)
        )
        if as_recorded:
            self.storages[ref.slot] = made.untyped_storage()
        else:
            view(ref, self.allocate(ref.slot, zeroed=False)).copy_(made)


def _run(node: Node, memory: _Memory, wanted: Mapping[Slot, str]) -> None:
    if node.is_blank:
        for _, ref in node.made:
            memory.allocate(ref.slot, zeroed=True)
        return
    try:
        args, kwargs = map_leaves(memory.tensor, node.args), map_leaves(memory.tensor, node.kwargs)
        result = _call(node, args, _placed(kwargs, memory))
    except InitError as error:
        raise InitError(
            f"{error.what} (by {node.name})",
            parameter=_names(node, wanted),
            expected=error.expected,
            got=error.got,
            remedy=error.remedy,
        ) from error
    except Exception as error:
        raise InitError(
            f"The recorded operation {node.name} failed when it was replayed: {error}",
            parameter=_names(node, wanted),
            remedy="materialise on another device, or build eagerly inside seeded_init(seed)",
        ) from error
    outputs = list(tensors_in(result)) if isinstance(result, (list, tuple)) else [result]
    inputs = [*tensors_in(args), *tensors_in(kwargs)]
    for position, ref in node.made:
        memory.keep(ref, outputs[position], inputs)


def _call(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if node.is_composite:
        assert node.seed is not None
        return run_composite(node.op, args, node.seed)
    if node.seed is not None:
        return run_seeded(node.op, args, kwargs, node.seed)
    return node.op(*args, **kwargs)


def _placed(kwargs: dict[str, Any], memory: _Memory) -> dict[str, Any]:
    if kwargs.get("device") is not None:
        kwargs["device"] = memory.device_for(torch.device(kwargs["device"]))
        if kwargs.get("pin_memory") and kwargs["device"].type != "cpu":
            kwargs["pin_memory"] = False
    return kwargs


def _names(node: Node, wanted: Mapping[Slot, str], limit: int = 3) -> str:
    """What the node writes, by the names of its parameters; else what is being materialised with its help."""
    written = [wanted.get(slot, slot.label) for slot in node.writes if slot in wanted or slot.label]
    names = list(dict.fromkeys([name for name in written if name] or wanted.values()))
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


@contextmanager
def _real_world(default_dtype: torch.dtype) -> Iterator[None]:
    """No recording, no seeding by outer contexts, no autograd, no default device; the default dtype as recorded."""
    previous = torch.get_default_dtype()
    with paused(), torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
        torch.set_default_dtype(default_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(previous)
