"""The reduced gradient of one flat parameter, as the optimizer sees it.

Two faces over one memory ``flat`` [shard_numel]: a ``ShardedTensor`` per original parameter (``param.grad``) and,
once ``flat_parameters(model)`` has been asked for, one plain 1-D tensor (``flat_parameter.grad``); then the named
faces are made only when somebody looks at them. The memory and the faces are kept over ``zero_grad`` and used again,
unless somebody still holds one of them.

What an unsynchronised sum of micro-batches shows meanwhile: ``sum_markers.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_core.comm.memory import Buffer
from fsdp_core.comm.wire import BufferRole
from fsdp_core.errors import StateError
from fsdp_core.handle.flat_parameter import FlatParameter
from fsdp_core.handle.sharded_tensor import ShardedTensor, local_part, own_grad, set_own_grad
from fsdp_core.handle.sum_markers import UNTOUCHED, SumMarkers

if TYPE_CHECKING:
    from fsdp_core.handle.flat_param_handle import FlatParamHandle


class ShardGradient:
    """See the module's docstring."""

    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle = handle
        self._memory: Buffer | None = None
        self.flat: Tensor | None = None  # valid while some gradient is set
        self._parts: list[ShardedTensor | None] = []
        self.markers = SumMarkers(handle, self)
        self.cleared: set[int] = set()  # cleared by name while the gradient is flat
        self.outside: dict[int, ShardedTensor | None] = {}  # see ``note_outside``
        self._is_target = False  # a reduction that is on its way writes into ``flat``
        self._is_staged = False  # ``flat`` holds a gradient that becomes visible at the end of backward

    # -- where a reduction may write ---------------------------------------------------------------------------------

    def claim_target(self, dtype: torch.dtype) -> Buffer | None:
        """The memory of ``flat``, if the next reduced shard will simply become the gradient; else ``None``."""
        handle = self._handle
        if (
            self._is_target
            or self._is_staged
            or handle.is_offloaded
            or dtype != handle.dtypes.param
            or not self._is_unset()
        ):
            return None
        self._is_target = True
        self._fresh_flat()
        return self._memory

    def owns(self, buffer: Buffer) -> bool:
        """Is ``buffer`` what ``claim_target`` gave?"""
        return buffer is self._memory

    @property
    def is_empty(self) -> bool:
        """Is the next reduced shard the first of its step?"""
        return not self._is_staged and self._is_unset()

    @property
    def is_staged(self) -> bool:
        """Does a gradient wait for ``commit``?"""
        return self._is_staged

    def drop_target(self) -> None:
        self._is_target = self._is_staged = False

    def run_tensor_hooks(self, shard: Tensor | None, active: Sequence[int]) -> None:
        """Give each parameter's hooks its part of the new gradient (``None``: what is staged); they may replace it."""
        for index in active:
            parameter = self._handle.params[index]
            hooks = parameter.__dict__.get("grad_hooks")
            if not hooks:
                continue
            span = parameter.spec.span
            part = (
                self._part(index)
                if shard is None
                else ShardedTensor(
                    shard[span.shard_start : span.shard_end].to(self._handle.dtypes.param), parameter.spec
                )
            )
            for hook in list(hooks.values()):
                with torch.no_grad():
                    changed = hook(part)
                    if changed is not None:
                        part.local.copy_(changed.local)
            if shard is not None:
                shard[span.shard_start : span.shard_end].copy_(part.local)

    def run_post_accumulate_hooks(self, active: Sequence[int]) -> None:
        for index in active:
            parameter = self._handle.params[index]
            for hook in list((parameter.__dict__.get("post_accumulate_hooks") or {}).values()):
                with torch.no_grad():
                    hook(parameter)

    def _is_unset(self) -> bool:
        flat = self._handle.flat_parameter
        if flat is not None:
            return flat.grad is None
        return all(parameter.grad is None for parameter in self._handle.params)

    @property
    def memory(self) -> Tensor | None:
        """What gradients lie in, kept from step to step; None before the first one. Not valid as a gradient."""
        return None if self._memory is None else self._memory.memory

    def release(self) -> None:
        """Give back the memory that is kept for the next step's gradient; nothing happens while one is set."""
        if self._is_unset() and not self._is_target and not self._is_staged:
            self._memory = self.flat = None
            self._parts = [None] * len(self._handle.params)

    def _fresh_flat(self) -> Tensor:
        """Memory that nobody else sees: the previous step's if it is free, else new."""
        handle = self._handle
        if self._memory is None or self._is_held():
            self._memory = self.flat = None  # gone before the new one is there, unless somebody holds it
            self._parts = [None] * len(handle.params)
            self._memory = Buffer(self._allocate())
        self.flat = self._memory.memory
        return self.flat

    def _allocate(self) -> Tensor:
        handle = self._handle
        numel, dtype = handle.layout.shard_numel, handle.dtypes.param
        if not handle.is_offloaded:  # where the last wire of a reduction likes to write
            return handle.replicate_wire.empty(numel, dtype, BufferRole.GRAD_SHARD)
        with torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype, device=handle.sharded.device, pin_memory=torch.cuda.is_available())

    def _is_held(self) -> bool:
        """Did a user keep last step's gradient (itself, or a view)?"""
        assert self._memory is not None
        num_own = 4 + self._memory.view_refs  # buffer twice (memory, tensor), ``flat``, the argument
        if sys.getrefcount(self._memory.memory) > num_own:
            return True
        for part in self._parts:
            if part is not None and (sys.getrefcount(part) > 3 or sys.getrefcount(part.local) > 3):
                return True
        return self._memory.is_used_elsewhere()

    def _part(self, index: int) -> ShardedTensor:
        """The face of parameter ``index`` over ``flat``."""
        part = self._parts[index]
        if part is None:
            assert self._memory is not None
            parameter = self._handle.params[index]
            span = parameter.spec.span
            local = self._memory.cached(index, lambda memory: memory[span.shard_start : span.shard_end])
            part = self._parts[index] = ShardedTensor(local, parameter.spec)
        return part

    def stage(self, shard: Tensor) -> bool:
        """Put the first gradient of a step in place without showing it yet; false if there is one to add to."""
        if not self._is_unset():
            return False
        if self._is_staged:  # a second reduction of the same backward
            assert self.flat is not None
            self.flat.add_(shard)
        else:
            self._become(shard)
            self._is_staged = True
        return True

    def _is_own(self, shard: Tensor) -> bool:
        return shard is self.flat  # not by address: on paper (``simulate``) there are none

    def commit(self, active: Sequence[int]) -> None:
        """Show what was staged."""
        self._is_target = self._is_staged = False
        flat = self._handle.flat_parameter
        if flat is not None:
            flat.grad = self.flat
            self.cleared.clear()
            self.add_outside()
            return
        self.outside.clear()
        for index in active:
            parameter, part = self._handle.params[index], self._part(index)
            outside = own_grad(parameter)  # autograd put it there after this was staged
            if outside is not None:
                assert isinstance(outside, ShardedTensor)
                part.local.add_(outside.local)
            parameter.grad = part

    # -- accumulate --------------------------------------------------------------------------------------------------

    def accumulate(self, shard: Tensor, active: Sequence[int]) -> None:
        """Add a reduced, already averaged shard to the gradients of the parameters ``active``."""
        with torch.no_grad():
            if self._handle.flat_parameter is not None:
                self._accumulate_flat(self._handle.flat_parameter, shard)
            else:
                self._accumulate_named(shard, active)
        self._is_target = False

    def _accumulate_flat(self, parameter: FlatParameter, shard: Tensor) -> None:
        self.cleared.clear()
        if parameter.grad is None:
            parameter.grad = self._become(shard)
        else:
            parameter.grad.add_(shard)

    def _become(self, shard: Tensor) -> Tensor:
        if self._is_own(shard):
            assert self.flat is not None
            return self.flat  # the reduction wrote here
        flat = self._fresh_flat()
        return flat.copy_(shard, non_blocking=self._handle.is_offloaded)

    def _accumulate_named(self, shard: Tensor, active: Sequence[int]) -> None:
        params = self._handle.params
        grads = [params[index].grad for index in active]
        if all(grad is None for grad in grads) and self._is_unset():
            self._become(shard)
            for index in active:
                params[index].grad = self._part(index)
            return
        parts = self._parts
        if len(active) == len(params) == len(parts) and all(
            grad is parts[i] for grad, i in zip(grads, active, strict=True)
        ):
            assert self.flat is not None
            self.flat.add_(shard)
            return
        for index, grad in zip(active, grads, strict=True):
            self._accumulate_one(index, grad, shard)

    def _accumulate_one(self, index: int, grad: Tensor | None, shard: Tensor) -> None:
        parameter = self._handle.params[index]
        span = parameter.spec.span
        piece = shard[span.shard_start : span.shard_end]
        if grad is None:
            if self._memory is None:
                self._fresh_flat()
            part = self._part(index)
            if sys.getrefcount(part) > 3:  # kept by the user: give this parameter a face of its own
                part = ShardedTensor(torch.empty_like(part.local), parameter.spec)
            part.local.copy_(piece)
            parameter.grad = part
        elif isinstance(grad, ShardedTensor):
            grad.local.add_(piece)
        else:
            raise StateError(
                "The gradient of a sharded parameter was replaced by a plain tensor.",
                unit=self._handle.unit_name,
                parameter=parameter.spec.fqn,
                remedy="change param.grad in place, or set it to None",
            )

    # -- gradients past the unit's node -----------------------------------------------------------------------------

    def take_outside(self, parameter: ShardedTensor) -> ShardedTensor | None:
        """What autograd itself has just put into a parameter, for a term of the loss that looks at it outside of its
        unit (a penalty on its norm). Such terms are the same on all ranks: no mean. While the gradient is flat it is
        taken from there, else it stays and ``None`` is returned."""
        grad = own_grad(parameter)
        assert grad is not None
        if not isinstance(grad, ShardedTensor):  # of a sum, or of a product with whole values: it is whole, too
            grad = ShardedTensor(local_part(grad, parameter.spec).clone(), parameter.spec)
            set_own_grad(parameter, grad)
        if self._handle.flat_parameter is None:
            return None
        set_own_grad(parameter, None)
        return grad

    def note_outside(self, parameter: ShardedTensor, grad: ShardedTensor | None) -> None:
        """Keep what ``take_outside`` gave until the end of backward."""
        index = self._handle.index_of(parameter)
        known = self.outside.get(index)
        if known is not None and grad is not None:
            known.local.add_(grad.local)
        else:
            self.outside[index] = grad

    def note_strays(self) -> None:
        """While the gradient is flat: what came in without a word (through a function of the user's own, whose forward
        shows autograd's operations to nobody)."""
        for parameter in self._handle.params if self._handle.flat_parameter is not None else ():
            if own_grad(parameter) is not None:
                self.note_outside(parameter, self.take_outside(parameter))

    def add_outside(self) -> None:
        """Add what was noted to the gradient that is shown; the user's tensor hooks have seen it."""
        noted, self.outside = self.outside, {}
        flat = self._handle.flat_parameter
        for index, grad in noted.items():
            if grad is None or flat is None:
                continue
            if flat.grad is None:
                flat.grad = torch.zeros_like(self._handle.sharded)
                self.cleared.clear()
            span = self._handle.params[index].spec.span
            flat.grad[span.shard_start : span.shard_end].add_(grad.local)
            self.cleared.discard(index)

    # -- what stands for sums that are kept elsewhere ----------------------------------------------------------------

    def show_markers(self, active: Sequence[int]) -> None:
        """Every active parameter shows a gradient: zeros, where it has none."""
        handle = self._handle
        with torch.no_grad():
            if handle.flat_parameter is not None:
                if handle.flat_parameter.grad is None:
                    handle.flat_parameter.grad = self._fresh_flat().fill_(UNTOUCHED)
                self.cleared.difference_update(active)
                return
            missing = [index for index in active if handle.params[index].grad is None]
            if missing and self._is_unset():
                self._fresh_flat().zero_()
            for index in missing:
                if self._memory is None:
                    self._fresh_flat()
                part = self._part(index)
                part.local.zero_()
                handle.params[index].grad = part

    # -- gradients by name while they are flat -----------------------------------------------------------------------

    def face_of(self, parameter: ShardedTensor) -> ShardedTensor | None:
        """``parameter.grad``: its part of the flat gradient."""
        flat = self._handle.flat_parameter
        assert flat is not None
        if flat.grad is None:
            return None
        index = self._handle.index_of(parameter)
        if flat.grad is self.flat:
            return self._part(index)
        span = parameter.spec.span
        return ShardedTensor(flat.grad[span.shard_start : span.shard_end], parameter.spec)

    def set_face_of(self, parameter: ShardedTensor, value: Tensor | None) -> None:
        """``parameter.grad = value``. ``None`` clears the part; once every part is cleared, so is the flat gradient."""
        flat = self._handle.flat_parameter
        assert flat is not None
        if flat.grad is None:
            if value is None:
                return
            flat.grad = torch.zeros_like(self._handle.sharded)
        span = parameter.spec.span
        region = flat.grad[span.shard_start : span.shard_end]
        if value is not None:
            with torch.no_grad():
                region.copy_(local_part(value, parameter.spec))
            return
        self.cleared.add(self._handle.index_of(parameter))
        if all(index in self.cleared for index, p in enumerate(self._handle.params) if p.requires_grad):
            flat.grad = None
            return
        with torch.no_grad():
            region.zero_()
        self.markers.renew(flat.grad)

    # -- whole-shard access for norms and state ----------------------------------------------------------------------

    def local_grads(self) -> list[Tensor]:
        """The local parts of all gradients that are set; their concatenation is this rank's gradient."""
        flat = self._handle.flat_parameter
        if flat is not None:
            return [] if flat.grad is None else [flat.grad]
        grads = [parameter.grad for parameter in self._handle.params]
        if self.flat is not None and all(g is not None and g is p for g, p in zip(grads, self._parts, strict=False)):
            return [self.flat]
        return [grad.local for grad in grads if isinstance(grad, ShardedTensor)]

    def move_to(self, flat_parameter: FlatParameter) -> None:
        """Gradients that exist move from the original parameters to ``flat_parameter``."""
        grads = [parameter.grad for parameter in self._handle.params]
        if any(grad is not None for grad in grads):
            total = torch.zeros_like(self._handle.sharded)
            for parameter, grad in zip(self._handle.params, grads, strict=True):
                if isinstance(grad, ShardedTensor):
                    span = parameter.spec.span
                    total[span.shard_start : span.shard_end].copy_(grad.local)
                parameter.grad = None
            flat_parameter.grad = total  # ``handle.flat_parameter`` is set by the caller, after this

    def copy_from(self, other: ShardGradient) -> None:
        """deepcopy: the copy has equal gradients of its own."""
        for index, parameter in enumerate(other._handle.params):
            grad = parameter.grad
            if isinstance(grad, ShardedTensor):
                spec = self._handle.params[index].spec
                self._handle.params[index].grad = ShardedTensor(grad.local.clone(), spec)
