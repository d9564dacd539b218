"""No optimizer writes shards that a peer may still be reading.

A backward ends with the agreement that shards may be written. A forward that no backward followed, with gradients
enabled all the same, has no such end; and a hook that steps an optimizer inside backward comes before it. Where a
wire lets peers read shards in place, those steps would change the weights under a peer's running computation. So
before each step of an optimizer, the engines whose parameters it holds make up for the agreement that is missing.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from fsdp_core.runtime.context import Context

_read: weakref.WeakSet[Context] = weakref.WeakSet()  # gathered since the last agreement
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


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if not _read:
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for context in list(_read):
        if any(
            id(handle.flat_parameter) in stepped or any(id(parameter) in stepped for parameter in handle.params)
            for _, handle in context.each_handle()
        ):
            context.settle()
