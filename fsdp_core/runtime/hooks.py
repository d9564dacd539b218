"""Registers the engine's module hooks. Decides nothing.

The pre-forward hook goes first, so that hooks the user had registered before see full weights; the forward hook is
called also when forward raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from fsdp_core.runtime.unit import Unit

UNIT_KEY = "_fsdp_core_unit"  # in module.__dict__: a unit copies along when its module is copied


def attach(unit: Unit) -> None:
    for module in unit.modules:
        module.__dict__[UNIT_KEY] = unit
        module.register_forward_pre_hook(unit.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(unit.post_forward, with_kwargs=True, always_call=True)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit whose forward this module's forward is, if it is one."""
    return module.__dict__.get(UNIT_KEY)
