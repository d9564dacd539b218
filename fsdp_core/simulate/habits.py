"""Habits of another engine or training loop, assumed for a plan: which memory they take, and how long they keep it.

A plan is of this engine. Where a run of another one is to be understood (the FSDP paper's, on PyTorch's
``FullyShardedDataParallel`` of early 2023), its habits are played while the tape is recorded; order, wires, streams and
limiter stay this engine's own.

``concatenates_gradients``: weights are views that autograd splits off a flat parameter. The split's backward waits
until all gradients of a unit are there and concatenates them: two copies of them for a moment, beside the weights,
which are freed afterwards. This engine copies a large gradient as soon as it is complete, and frees the weights first.

``frees_gradients``: ``zero_grad(set_to_none=True)`` gives the memory of reduced gradients back before the next forward.
This engine keeps it for the next step.

``keeps_output``: a variable of the loop keeps what the model returned until the next forward has returned. This
project's loop keeps the loss alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from torch import Tensor, nn

from fsdp_core.runtime import unit as unit_module
from fsdp_core.runtime.find import contexts_in

if TYPE_CHECKING:
    from fsdp_core.runtime.unit import Unit
    from fsdp_core.simulate.recording import Recorder

Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Habits:
    """See the module's docstring; the defaults are this engine's."""

    concatenates_gradients: bool = False
    frees_gradients: bool = False
    keeps_output: bool = False

    @contextmanager
    def while_built(self, recorder: Recorder) -> Iterator[None]:
        """Around everything that builds and trains the model."""
        if not self.concatenates_gradients:
            yield
            return
        own = unit_module.Unit.post_backward

        def post_backward(unit: Unit, node: Any, grads: Gradients) -> Gradients:
            return own(unit, node, _concatenated(recorder, unit, node, grads))

        with (
            patch.object(unit_module, "EARLY_NUMEL", sys.maxsize),  # nothing is collected before its unit is through
            patch.object(unit_module.Unit, "post_backward", post_backward),
        ):
            yield

    def watch(self, model: nn.Module) -> None:
        """Once, before the first step."""
        if self.keeps_output:
            kept: list[object] = []

            def keep(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
                kept[:] = [output]

            model.register_forward_hook(keep)

    def after_step(self, model: nn.Module) -> None:
        """Once gradients have been cleared."""
        if self.frees_gradients:
            for context in contexts_in(model):
                for _, handle in context.each_handle():
                    handle.gradient.release()


def _concatenated(recorder: Recorder, unit: Unit, node: Any, grads: Gradients) -> Gradients:
    """All gradients of a unit copied into its source while the weights are still there, and let go of. What cannot be
    collected is given back."""
    left = tuple(
        None if grad is None else unit.early_gradient(node, position, grad)
        for position, grad in zip(node.positions, grads, strict=True)
    )
    for grad, remaining in zip(grads, left, strict=True):
        if grad is not None and remaining is None:
            recorder.let_go(grad)
    return left
