"""A tensor without memory: ``DeferredTensor``, and the Python-level calls on it that never reach the dispatcher."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fsdp_core.errors import InitError
from fsdp_core.init.recording import Recording, Slot, TensorRef, tensors_in
from fsdp_core.init.seeding import is_paused, paused

SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class Records(Protocol):
    """What a deferred tensor asks of its recorder."""

    recording: Recording
    read_only_arrays: list[str | None]

    def dispatch(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any: ...

    def evaluate(self, tensors: Sequence[DeferredTensor], reason: str) -> list[Tensor]: ...

    def adopt(self, tensor: Tensor) -> DeferredTensor: ...


class DeferredTensor(Tensor):
    """A tensor of a recorded build. ``meta`` holds its geometry, ``slot`` its place in the recording."""

    meta: Tensor
    slot: Slot
    recorder: Records
    is_delivered: bool

    @staticmethod
    def __new__(cls, meta: Tensor, slot: Slot, recorder: Records) -> DeferredTensor:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=slot.device,
            requires_grad=False,
        )
        tensor.meta, tensor.slot, tensor.recorder = meta, slot, recorder
        tensor.is_delivered = False
        return tensor

    def __init__(self, *args: Any) -> None:  # torch calls it with whatever ``__new__`` got
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert not is_paused(), f"{op} reached a tensor without memory while running for real"
        recorder = next(t.recorder for t in tensors_in([args, kwargs]) if isinstance(t, DeferredTensor))
        return recorder.dispatch(op, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _FUNCTION_HANDLERS.get(function)
        with torch._C.DisableTorchFunctionSubclass():
            return handler(*args, **kwargs or {}) if handler else function(*args, **kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "Parameter, " if isinstance(self, torch.nn.Parameter) else ""
        return f"DeferredTensor({kind}size={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            twin = self.detach().clone().requires_grad_(self.requires_grad)
        for name, value in user_attributes(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refusal("pickling", self)

    def ref(self) -> TensorRef:
        """This tensor's slot and present geometry."""
        meta = self.meta
        return TensorRef(
            self.slot,
            meta.dtype,
            tuple(meta.shape),
            meta.stride(),
            int(meta.storage_offset()),
            meta.is_conj(),
            meta.is_neg(),
        )


_OWN_ATTRIBUTES = frozenset({"meta", "slot", "recorder", "is_delivered"})


def user_attributes(tensor: Tensor) -> dict[str, Any]:
    """What somebody put on a tensor (``_is_param``, ``_no_weight_decay``, ...), without what makes it deferred."""
    hidden = _OWN_ATTRIBUTES if isinstance(tensor, DeferredTensor) else frozenset()
    return {name: value for name, value in vars(tensor).items() if name not in hidden}


def refusal(action: str, *tensors: Tensor) -> InitError:
    names = [t.slot.label or repr(t) for t in tensors if isinstance(t, DeferredTensor)]
    return InitError(
        f"{action} needs memory that a deferred tensor does not have",
        parameter=", ".join(names) or None,
        remedy="do it after materialize(), or build eagerly inside seeded_init(seed)",
    )


def show_geometry(tensor: Tensor, like: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        SET_DATA(tensor, like)


# -- Python-level calls that never reach the dispatcher --------------------------------------------------------------


def set_data(tensor: Tensor, value: Tensor) -> None:
    """``tensor.data = value``: the tensor moves to the other's slot and geometry."""
    if not isinstance(tensor, DeferredTensor):
        assert isinstance(value, DeferredTensor)
        SET_DATA(tensor, value.recorder.evaluate([value], "Tensor.data")[0].clone())
        return
    source = value if isinstance(value, DeferredTensor) else tensor.recorder.adopt(value)
    with paused():
        meta = torch.ops.aten.alias.default(source.meta)
    show_geometry(tensor, DeferredTensor(meta, source.slot, source.recorder))
    tensor.meta, tensor.slot = meta, source.slot


def _to_list(tensor: DeferredTensor) -> Any:
    return tensor.recorder.evaluate([tensor], "Tensor.tolist")[0].tolist()


def _to_array(tensor: DeferredTensor, *args: Any, **kwargs: Any) -> Any:
    """A read-only array: writes to it would be lost."""
    real = tensor.recorder.evaluate([tensor], "Tensor.numpy")[0].requires_grad_(tensor.requires_grad)
    array = real.numpy(*args, **kwargs)
    array.setflags(write=False)
    tensor.recorder.read_only_arrays.append(tensor.slot.label)
    return array


def _as_array(tensor: DeferredTensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    array = _to_array(tensor)
    return array if dtype is None else array.astype(dtype, copy=False)


def _refuse(action: str) -> Callable[..., Any]:
    def handler(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise refusal(action, tensor)

    return handler


_FUNCTION_HANDLERS: dict[Any, Callable[..., Any]] = {
    SET_DATA: set_data,
    Tensor.tolist: _to_list,
    Tensor.numpy: _to_array,
    Tensor.__array__: _as_array,
    **{
        getattr(Tensor, name): _refuse(f"Tensor.{name}()")
        for name in ("data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_", "__dlpack__")
    },
}
