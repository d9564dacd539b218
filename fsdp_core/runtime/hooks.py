"""Registers the engine's module hooks. Decides nothing.

The pre-forward hook goes first, so that hooks the user had registered before see full weights; the forward hook is
called also when forward raises an exception. After an interrupt nobody calls it: ``num_running`` tells.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from types import FrameType

    from fsdp_core.runtime.unit import Unit

UNIT_KEY = "_fsdp_core_unit"  # in module.__dict__: a unit copies along when its module is copied


def attach(unit: Unit) -> None:
    for module in unit.modules:
        module.__dict__[UNIT_KEY] = unit
        module.register_forward_pre_hook(unit.pre_forward, prepend=True, with_kwargs=True)
        handle = module.register_forward_hook(unit.post_forward, with_kwargs=True, always_call=True)
        unit.post_hooks[module] = handle.id


def unit_of(module: nn.Module) -> Unit | None:
    """The unit whose forward this module's forward is, if it is one."""
    return module.__dict__.get(UNIT_KEY)


class ForwardMethod:
    """A method that runs between the hooks of a forward. It copies along with its module."""

    def __init__(self, unit: Unit, module: nn.Module, method: Callable[..., Any]) -> None:
        self._unit, self._module, self._method = unit, module, method
        functools.update_wrapper(self, method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        changed = self._unit.pre_forward(self._module, args, kwargs)
        if changed is not None:
            args, kwargs = changed
        output = None
        try:
            output = self._method(*args, **kwargs)
        finally:
            replaced = self._unit.post_forward(self._module, args, kwargs, output)
        return output if replaced is None else replaced


def num_running(unit: Unit) -> int:
    """Calls of the unit that are on this thread's stack, the one that asks included. Slow."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module.__call__.__code__:
            count += frame.f_locals.get("self") in unit.modules
        elif frame.f_code is ForwardMethod.__call__.__code__:
            count += frame.f_locals["self"]._unit is unit
        frame = frame.f_back
    return count
