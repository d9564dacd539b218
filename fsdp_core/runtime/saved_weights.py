"""What autograd saves for backward, when it lies in a buffer that will be given away after forward.

A saved tensor that points into a gathered buffer is kept as a record (unit, place in the buffer) and made anew at
backward, on whatever buffer the unit then has; anything else is kept as it is. This is what makes reshard after
forward possible without anybody's help: no output hook has to fire, no storage is resized under a saved tensor.

Hooks that a user or activation checkpointing has pushed are left alone: then what they keep, keeps the buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp_core.errors import StateError

if TYPE_CHECKING:
    from fsdp_core.handle.flat_param_handle import FlatParamHandle
    from fsdp_core.runtime.unit import Unit

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_are_hooks_enabled = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


def _address(tensor: Tensor) -> int:
    """Where the first element lies. Tensors without memory get a range of their own for each storage."""
    if tensor.is_meta:
        return (tensor.untyped_storage()._cdata << 48) + tensor.storage_offset() * tensor.itemsize
    return tensor.data_ptr()


class SavedWeight:
    """One saved view of a gathered buffer."""

    __slots__ = ("epoch", "handle", "is_counted", "shape", "start", "stride", "unit", "version")

    def __init__(self, unit: Unit, handle: FlatParamHandle, start: int, tensor: Tensor) -> None:
        self.unit, self.handle = unit, handle
        self.epoch = handle.write_epoch()
        self.start, self.shape, self.stride = start, tensor.shape, tensor.stride()
        self.version = tensor._version
        self.is_counted = True


class SavedTensorHooks:
    """The pair of hooks of one root, pushed around the forward of each unit that reshards after it."""

    def __init__(self) -> None:
        self._open: list[tuple[int, int, Unit, FlatParamHandle]] = []  # address ranges of buffers that may be saved

    def push(self, unit: Unit) -> bool:
        """False if somebody else's hooks are in force, or hooks are disabled: then nothing was pushed."""
        if not _are_hooks_enabled():
            return False
        top = _top_hooks(False)
        if top is not None and top[0] != self.pack:
            return False
        for handle in unit.handles:
            buffer = handle.full_buffer
            if buffer is not None and handle.fixed_full is None:
                first = _address(buffer.tensor)
                self._open.append((first, first + buffer.tensor.nbytes, unit, handle))
        _push_hooks(self.pack, self.unpack)
        return True

    def pop(self, unit: Unit) -> None:
        _pop_hooks()
        self._open = [entry for entry in self._open if entry[2] is not unit]

    def abandon(self) -> None:
        """Forwards were left without a word (an interrupt): what they pushed is still in force on this thread."""
        while (top := _top_hooks(False)) is not None and top[0] == self.pack:
            _pop_hooks()
        self._open.clear()

    def pack(self, tensor: Tensor) -> Any:
        address = _address(tensor)
        for first, end, unit, handle in self._open:
            if first <= address < end and tensor.dtype == handle.dtypes.compute and not tensor.is_conj():
                saved = SavedWeight(unit, handle, (address - first) // tensor.itemsize, tensor)
                unit.note_saved(saved)
                return saved
        return tensor, tensor._version

    def unpack(self, packed: Any) -> Tensor:
        if type(packed) is tuple:
            tensor, version = packed
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{tensor.dtype}, shape {tuple(tensor.shape)}] is at version {tensor._version}; "
                    f"expected version {version} instead"
                )
            return tensor.detach()
        return unpack_weight(packed)


def unpack_weight(saved: SavedWeight) -> Tensor:
    """The saved view again, on the unit's present buffer; gathers if needed."""
    handle = saved.handle
    saved.unit.enter_backward(saved)
    if saved.epoch != handle.write_epoch():
        raise StateError(
            "A parameter needed for gradient computation was modified in place after the forward that used it.",
            unit=handle.unit_name,
            expected="no optimizer step, load or in-place write between forward and backward",
            got="a write",
            remedy="run backward before changing parameters, or run the forward again",
        )
    buffer = handle.full_buffer
    assert buffer is not None
    return buffer.memory.as_strided(saved.shape, saved.stride, buffer.memory.storage_offset() + saved.start)
