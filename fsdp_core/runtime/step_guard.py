"""No optimizer steps at a wrong time.

A backward ends with the agreement that shards may be written. A forward that no backward followed, with gradients
enabled all the same, has no such end; and a hook that steps an optimizer inside backward comes before it. Where a
wire lets peers read shards in place, those steps would change the weights under a peer's running computation. So
before each step of an optimizer, the engines whose parameters it holds make up for the agreement that is missing.

While micro-batches run without communication the gradients that an optimizer sees are not those of anything: their
sum is kept elsewhere. A step on them is refused.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fsdp_core.errors import StateError

if TYPE_CHECKING:
    from fsdp_core.handle.flat_param_handle import FlatParamHandle
    from fsdp_core.runtime.context import Context

_read: weakref.WeakSet[Context] = weakref.WeakSet()  # gathered since the last agreement
_summed: weakref.WeakSet[Context] = weakref.WeakSet()  # micro-batches have been summed here and not sent
_handles: list[object] = []


def shards_are_read(context: Context) -> None:
    """From now on peers may read this rank's shards."""
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))
    _read.add(context)


def are_shards_read(context: Context) -> bool:
    """Is the agreement that shards may be written missing since the last gather?"""
    return context in _read


def shards_are_free(context: Context) -> None:
    """All ranks have agreed that shards may be written."""
    _read.discard(context)


def sums_are_kept(context: Context) -> None:
    """A backward without communication has added to sums that no optimizer sees."""
    _summed.add(context)


def sums_are_sent(context: Context) -> None:
    """Every sum has been reduced into gradients."""
    _summed.discard(context)


def refuse_unsent(context: Context, handle: FlatParamHandle, what: str) -> None:
    """Raises where gradients of ``handle`` have been summed, and neither sent nor cleared.

    Raises:
        StateError: ``what`` would use gradients that are not there.
    """
    if context in _summed and handle.has_unsent_sum:
        raise StateError(
            f"{what} while the gradients of micro-batches are still sums on each rank.",
            unit=handle.unit_name,
            parameter=", ".join(parameter.spec.fqn for parameter in handle.params[:3]),
            expected="a backward outside of no_sync, which sends them",
            got="only backward passes inside no_sync",
            remedy="run the last micro-batch outside of no_sync, or give the sums up with zero_grad",
        )


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if not (_read or _summed):
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for context in sorted({*_read, *_summed}, key=lambda context: context.number):  # settling is collective
        held = [
            handle
            for _, handle in context.each_handle()
            if id(handle.flat_parameter) in stepped or any(id(parameter) in stepped for parameter in handle.params)
        ]
        for handle in held:
            refuse_unsent(context, handle, "An optimizer steps")
        if held and context in _read:
            context.settle()
