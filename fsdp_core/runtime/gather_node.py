"""The one autograd node of a unit: sharded parameters in, full tensors out; its backward reduces.

The node is made when a forward enters the unit, so that its sequence number is lower than that of every operation
in the unit: autograd runs it after all of them, when the unit's gradients are complete. Its outputs are saved as
plain indices by a pair of saved-tensor hooks of its own: ``node.saved_tensors`` then yields fresh tensors on the
same edges, which is how a unit called twice in one forward reduces once.

Behind the output of a large parameter stands a node of its own (``EarlyNode``), which autograd runs as soon as that
gradient is complete, ahead of everything else: it moves the gradient to where the unit's gradients are collected,
while it is still in the cache, and autograd's own copy goes at once instead of at the end of the unit's backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fsdp_core.runtime.unit import Unit

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_FIRST = 2**63 - 1  # autograd runs the ready node of the highest number; its own accumulation nodes have 2**64 - 1


class GatherNode(torch.autograd.Function):
    """``apply(unit, full_tensors, *sharded)``: ``full_tensors`` are returned as the outputs, one per ``sharded``."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, full_tensors: list[Tensor], *sharded: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.positions = unit.trainable_positions
        ctx.is_spent = False
        ctx.epochs = unit.write_epochs()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*full_tensors)
        return tuple(full_tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.unit.post_backward(ctx, grads))


def make_node(unit: Unit, full_tensors: list[Tensor], sharded: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Any]:
    """The outputs and their node. ``full_tensors`` must be fresh: they become the outputs themselves."""
    positions = iter(range(len(full_tensors)))
    _push_hooks(lambda tensor: next(positions), unit.fresh_full_tensor)
    try:
        outputs = GatherNode.apply(unit, full_tensors, *sharded)
    finally:
        _pop_hooks()
    return outputs, outputs[0].grad_fn


class EarlyNode(torch.autograd.Function):
    """``apply(unit, position, output)``: ``output`` itself, under a version counter of its own."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, position: int, output: Tensor) -> Tensor:
        ctx.unit, ctx.position = unit, position
        ctx.set_materialize_grads(False)
        return output.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, Tensor | None]:
        if grad is None:
            return None, None, None
        node, _ = ctx.next_functions[0]
        return None, None, ctx.unit.early_gradient(node, ctx.position, grad)


def collect_early(unit: Unit, position: int, output: Tensor) -> Tensor:
    """``output`` of the unit's node, behind an ``EarlyNode``."""
    made: Tensor = EarlyNode.apply(unit, position, output)
    assert made.grad_fn is not None
    made.grad_fn._set_sequence_nr(_FIRST)  # type: ignore[attr-defined]
    return made


def tensors_of_node(node: Any) -> tuple[Tensor, ...] | None:
    """Fresh tensors on the node's output edges, or ``None`` if its graph has been released."""
    if node.is_spent:
        return None
    try:
        return node.saved_tensors
    except RuntimeError:
        return None
