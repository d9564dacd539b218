"""The state of one pass and of one backward: dropped and made anew, so that a step that failed leaves no trace."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from fsdp_core.runtime.prefetch import ForwardOrder, ForwardPrediction

if TYPE_CHECKING:
    from fsdp_core.runtime.context import Context
    from fsdp_core.runtime.unit import Unit


class Pass:
    """One outermost forward and what follows it, until the next one begins."""

    def __init__(self, previous_order: list[int], has_grad: bool) -> None:
        self.order = ForwardOrder()
        self.prediction = ForwardPrediction(previous_order)
        self.has_grad = has_grad
        self.free_later: list[Unit] = []  # forward has returned, freed when the next unit begins
        self.num_open = 0  # forwards that have not returned


class BackwardTasks:
    """The graph tasks (calls into autograd) that have touched the engine and are not finished.

    Each holds its end-of-backward callback by a weak reference: autograd owns the callback, so a callback that is
    gone without having run belonged to a backward that failed.
    """

    def __init__(self) -> None:
        self.callbacks: dict[int, weakref.ref[EndOfBackward]] = {}

    def forget_failed(self) -> bool:
        """Drop tasks that failed; true if there were any."""
        failed = [task for task, callback in self.callbacks.items() if callback() is None]
        for task in failed:
            del self.callbacks[task]
        return bool(failed)


class EndOfBackward:
    """The callback that autograd runs, and owns, at the end of one graph task."""

    def __init__(self, context: Context, task: int) -> None:
        self._context, self._task = context, task

    def __call__(self) -> None:
        self._context.end_backward(self._task)
