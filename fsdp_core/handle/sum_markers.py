"""What stands for the unsynchronised sum of one flat parameter, and what becomes of it before the sum is sent.

While micro-batches run without communication their sum is kept elsewhere (unsharded); the gradient that is visible
meanwhile is its *marker*. Clear it, with ``zero_grad`` in either form, and the sum goes with it. Any other write to it
is refused: the sum would not know of it. So is going on after a backward that failed with a part of it in the sum, or
in gradients of earlier micro-batches, until they have been cleared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_core.errors import StateError
from fsdp_core.handle.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from fsdp_core.handle.flat_param_handle import FlatParamHandle
    from fsdp_core.handle.shard_gradient import ShardGradient

UNTOUCHED = -0.0  # fills a flat marker: adds nothing, survives a scaling, does not survive a clearing


class SumMarkers:
    """See the module's docstring. The gradient that it belongs to tells it what happens."""

    def __init__(self, handle: FlatParamHandle, gradient: ShardGradient) -> None:
        self._handle, self._gradient = handle, gradient
        self._marked: set[int] = set()
        self._markers: dict[int, tuple[ShardedTensor, int, int]] = {}  # gradient, its clearings and writes so far
        self._flat: tuple[Tensor, int] | None = None
        self._witness: tuple[int, Tensor, int] | None = None  # see ``note_addition``
        self._is_torn = False

    # -- setting them ------------------------------------------------------------------------------------------------

    def set(self, active: Sequence[int]) -> None:
        """The sum holds gradients of the parameters ``active``: what these show is its marker from now on."""
        self._gradient.show_markers(active)
        self._marked.update(active)
        flat = self._handle.flat_parameter
        if flat is None:
            for index in active:
                self._remember(index, self._handle.params[index].grad)
            return
        assert flat.grad is not None
        self._flat = (flat.grad, flat.grad._version)
        for index in self._marked:  # a face written by name counts itself: dispatch moves no ``_version``
            self._remember(index, self._gradient.face_of(self._handle.params[index]))

    def _remember(self, index: int, grad: Tensor | None) -> None:
        assert isinstance(grad, ShardedTensor)
        self._markers[index] = (grad, grad.count.zeroed, _writes(grad))

    def drop(self) -> None:
        """The sum is on its way."""
        self._markers.clear()
        self._marked.clear()
        self._flat = None

    def renew(self, grad: Tensor) -> None:
        """The flat marker ``grad`` was written by the engine."""
        if self._flat is not None and self._flat[0] is grad:
            self._flat = (grad, grad._version)

    # -- asking what became of them ----------------------------------------------------------------------------------

    @property
    def indices(self) -> list[int]:
        """Parameters whose unsynchronised sum is being kept."""
        return sorted(self._marked)

    def is_cleared(self, index: int) -> bool:
        """Has the user cleared the gradient of this parameter since its sum was started?"""
        flat = self._handle.flat_parameter
        if flat is not None:
            if self._flat is None:
                return False
            marker, version = self._flat
            if flat.grad is not marker or index in self._gradient.cleared:
                return True
            zeroed = self._zeroed_by_name()
            return index in zeroed if zeroed else marker._version != version
        if index not in self._markers:
            return False
        part, count_then, _ = self._markers[index]
        return self._handle.params[index].grad is not part or part.count.zeroed != count_then

    def _zeroed_by_name(self) -> list[int]:
        return [index for index, (face, zeroed, _) in self._markers.items() if face.count.zeroed != zeroed]

    def check(self, unit: str) -> None:
        """Before the sum is added to or sent.

        Raises:
            StateError: the gradients that stand for it were changed otherwise than by clearing them.
        """
        if self._is_changed():
            raise StateError(
                "Gradients were changed while their sum over micro-batches is kept elsewhere, inside no_sync.",
                unit=unit,
                expected="nothing but zero_grad before the first backward outside of no_sync has ended",
                got="another write, which the sum does not know of",
                remedy="scale the loss instead, or run the micro-batches without no_sync",
            )

    def _is_changed(self) -> bool:
        params = self._handle.params
        flat = self._handle.flat_parameter
        if flat is None:
            return any(
                params[index].grad is part and part.count.zeroed == zeroed and _writes(part) != writes
                for index, (part, zeroed, writes) in self._markers.items()
            )
        if self._flat is None or flat.grad is not self._flat[0] or flat.grad._version == self._flat[1]:
            return False
        if any(f.count.zeroed == zeroed and _writes(f) != writes for f, zeroed, writes in self._markers.values()):
            return True
        return not self._zeroed_by_name() and _is_touched(flat.grad)

    # -- a backward that fails after it has added to what was there --------------------------------------------------

    def note_addition(self, active: Sequence[int]) -> None:
        """The running backward adds to a gradient or a sum of earlier ones."""
        flat = self._handle.flat_parameter
        if flat is not None:
            self._witness = None if flat.grad is None else (-1, flat.grad, flat.grad._version)
            return
        for index in active:
            grad = self._handle.params[index].grad
            if isinstance(grad, ShardedTensor):
                self._witness = (index, grad, grad.count.zeroed)
                return

    def forget_addition(self) -> None:
        """It has ended well."""
        if not self._is_torn:
            self._witness = None

    def tear(self) -> None:
        """That backward has failed: what is left holds a part of it."""
        self._is_torn = self._witness is not None

    def check_whole(self, unit: str) -> None:
        """Before anything is added again.

        Raises:
            StateError: a failed backward has left a part of itself here, and nobody has cleared it.
        """
        if not self._is_torn:
            return
        assert self._witness is not None
        index, grad, mark = self._witness
        if index < 0:
            flat = self._handle.flat_parameter
            is_cleared = flat is None or flat.grad is not grad or grad._version != mark
        else:
            assert isinstance(grad, ShardedTensor)
            is_cleared = self._handle.params[index].grad is not grad or grad.count.zeroed != mark
        if not is_cleared:
            raise StateError(
                "A backward that failed has left a part of itself in the gradients of earlier micro-batches.",
                unit=unit,
                expected="gradients of whole micro-batches only",
                got="another backward on top of them",
                remedy="call zero_grad and run the micro-batches of this step again",
            )
        self._is_torn, self._witness = False, None


def _writes(grad: ShardedTensor) -> int:
    """Writes that were not autograd's own."""
    return grad.count.writes - grad.count.in_backward


def _is_touched(marker: Tensor) -> bool:
    """False if all of it was cleared."""
    numbers = torch.view_as_real(marker) if marker.is_complex() else marker
    return bool((torch.signbit(numbers) | (numbers != 0)).any())
