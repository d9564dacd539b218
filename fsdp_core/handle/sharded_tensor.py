"""A tensor with the logical shape of an original parameter whose local data is this rank's segment of a flat shard.

What ``named_parameters()`` yields after sharding, and what its ``.grad`` and its optimizer state are. Names, shapes
and strides are the same on all ranks; ``local`` is 1-D and may be empty. Element-wise operations run on ``local``;
reductions to a number add one collective over the sharding group; anything else needs the full values and is
refused with the parameter's name. Which operation does what: ``sharded_ops.py``.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fsdp_core.comm.wire import Wire
from fsdp_core.errors import StateError
from fsdp_core.layout.flat_layout import LocalSpan


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """How a sharded tensor lies: shared by a parameter, its gradient and its optimizer state."""

    fqn: str
    shape: torch.Size
    stride: tuple[int, ...]
    span: LocalSpan  # what this rank holds
    wire: Wire  # of the sharding group

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardSpec:
        return self


_PLAIN_GRAD: Any = torch.Tensor.grad  # the slot in C++


def own_grad(parameter: Tensor) -> Tensor | None:
    """What autograd itself has put into a parameter, whatever its ``grad`` shows."""
    grad: Tensor | None = _PLAIN_GRAD.__get__(parameter)
    return grad


def set_own_grad(parameter: Tensor, grad: Tensor | None) -> None:
    _PLAIN_GRAD.__set__(parameter, grad)


class WriteCount:
    """Counts writes that went through a sharded tensor; ``_version`` misses those of fused optimizers."""

    __slots__ = ("in_backward", "writes", "zeroed")

    def __init__(self) -> None:
        self.writes = 0
        self.in_backward = 0  # those that happened while autograd was at work
        self.zeroed = 0  # those that cleared it


class ShardedTensor(torch.Tensor):
    """See the module's docstring. Parameters have ``_is_param``, which makes them ``nn.Parameter`` to isinstance."""

    local: Tensor
    spec: ShardSpec
    count: WriteCount
    owner: Any  # the handle of a parameter, None for gradients and states

    run_operation: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]  # set by sharded_ops

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        spec: ShardSpec,
        *,
        requires_grad: bool = False,
        count: WriteCount | None = None,
    ) -> ShardedTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, strides=spec.stride, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        made.local = local
        made.spec = spec
        made.count = count if count is not None else WriteCount()
        made.owner = None
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.run_operation(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        what = "ShardedParameter" if getattr(self, "_is_param", False) else "ShardedTensor"
        span = self.spec.span
        return (
            f"{what}({self.spec.fqn!r}, shape={tuple(self.spec.shape)}, dtype={self.local.dtype}, "
            f"local elements [{span.start}, {span.end}))"
        )

    # -- writes that bypass dispatch ------------------------------------------------------------------------------

    @property
    def data(self) -> ShardedTensor:
        return ShardedTensor(self.local, self.spec, count=self.count)

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, ShardedTensor) and value.local is self.local:
            return
        if value.shape != self.spec.shape or value.dtype != self.local.dtype:
            raise StateError(
                "A sharded parameter was assigned data of another shape or dtype.",
                parameter=self.spec.fqn,
                expected=f"shape {tuple(self.spec.shape)}, {self.local.dtype}",
                got=f"shape {tuple(value.shape)}, {value.dtype}",
                remedy="cast or resize the module before sharding it, or use MixedPrecision",
            )
        if value.device != self.local.device:
            raise StateError(
                "A sharded parameter cannot be moved to another device.",
                parameter=self.spec.fqn,
                expected=self.local.device,
                got=value.device,
                remedy="move the module before sharding it, or pass device= to fully_shard",
            )
        with torch.no_grad():
            self.local.copy_(local_part(value, self.spec))
        self.count.writes += 1

    @property
    def grad(self) -> Tensor | None:
        """As of any tensor; part of the flat gradient once ``flat_parameters`` has been asked for."""
        owner = self.owner
        if owner is None or owner.flat_parameter is None:
            return _PLAIN_GRAD.__get__(self)
        return owner.gradient.face_of(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        owner = self.owner
        if owner is None or owner.flat_parameter is None:
            _PLAIN_GRAD.__set__(self, value)
        else:
            owner.gradient.set_face_of(self, value)

    # -- user hooks: the engine calls them with the reduced shard ---------------------------------------------------

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        if self.owner is None:
            return super().register_hook(hook)
        return _register(self, "grad_hooks", hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        if self.owner is None:
            return super().register_post_accumulate_grad_hook(hook)
        return _register(self, "post_accumulate_hooks", hook)

    @property
    def has_user_hooks(self) -> bool:
        """Is there a hook that must see this parameter's reduced gradient?"""
        own = self.__dict__
        return bool(own.get("grad_hooks")) or bool(own.get("post_accumulate_hooks"))

    # -- copies ----------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]
        if self.owner is not None:
            self.owner.__deepcopy__(memo)  # copies the whole flat parameter; leaves this parameter's copy in memo
            return memo[id(self)]
        copied = ShardedTensor(self.local.clone(), self.spec, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    # -- there is no memory of the whole to hand out; torch's own versions would read past the end --------------------

    def share_memory_(self) -> NoReturn:
        self._refuse_memory("share_memory_")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse_memory("__dlpack__")

    def _refuse_memory(self, method: str) -> NoReturn:
        raise StateError(
            f"{method} asks for the memory of a sharded parameter, of which only a part is here.",
            parameter=self.spec.fqn,
            remedy="use a whole tensor from fsdp_core.state_dict(model), or one inside "
            "`with fsdp_core.full_parameters(model):`",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "A sharded tensor is part of a running engine and cannot be pickled.",
            parameter=self.spec.fqn,
            remedy="save fsdp_core.state_dict(model) (and fsdp_core.optim_state_dict) instead of the model itself",
        )


def _register(parameter: ShardedTensor, kind: str, hook: Callable[..., Any]) -> RemovableHandle:
    hooks = parameter.__dict__.get(kind)
    if hooks is None:
        hooks = parameter.__dict__[kind] = OrderedDict()
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


# -- gradients that autograd itself puts into a parameter, past its unit's node -------------------------------------


def hear_own_gradients(parameter: ShardedTensor) -> None:
    """From now on the owner of ``parameter`` is told of them, and the user's tensor hooks see them.

    Called when a term of the loss first looks at a parameter outside of its unit: autograd calls hooks in every
    backward, whether there is a gradient or not, and parameters that nobody looks at should not pay for that.
    """
    if "has_own_gradient" in parameter.__dict__:
        return
    parameter.__dict__["has_own_gradient"] = False
    self = weakref.ref(parameter)

    def on_the_way(grad: Tensor | None) -> Tensor | None:
        parameter = self()
        if parameter is None:
            return None
        parameter.__dict__["has_own_gradient"] = grad is not None
        if grad is None:  # the unit's node has dealt with it
            return None
        for hook in list((parameter.__dict__.get("grad_hooks") or {}).values()):
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad

    def accumulated(parameter: Tensor) -> None:
        assert isinstance(parameter, ShardedTensor)
        if parameter.__dict__["has_own_gradient"]:
            parameter.__dict__["has_own_gradient"] = False
            parameter.owner.note_outside(parameter)

    Tensor.register_hook(parameter, on_the_way)
    Tensor.register_post_accumulate_grad_hook(parameter, accumulated)


def local_part(value: Tensor, spec: ShardSpec) -> Tensor:
    """This rank's 1-D part of ``value``: sharded alike, or a plain tensor that broadcasts to the logical shape."""
    if isinstance(value, ShardedTensor):
        return value.local
    if value.shape != spec.shape:
        value = value.expand(spec.shape)
    if not any(value.stride()):  # one number everywhere: as it comes from a sum's backward
        return value.as_strided((spec.span.numel,), (0,))
    return flat_in_memory_order(value, spec)[spec.span.start : spec.span.end]


def flat_in_memory_order(value: Tensor, spec: ShardSpec) -> Tensor:
    """``value`` (of the logical shape) as 1-D, its elements in the order ``spec.stride`` puts them in memory."""
    if value.stride() != spec.stride:
        dense = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device)
        value = dense.copy_(value)
    return value.as_strided((spec.numel,), (1,))
