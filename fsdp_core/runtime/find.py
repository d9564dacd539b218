"""From a module to the engines inside it."""

from __future__ import annotations

from torch import nn

from fsdp_core.errors import StateError
from fsdp_core.runtime.context import Context
from fsdp_core.runtime.hooks import unit_of
from fsdp_core.runtime.unit import Unit


def units_in(model: nn.Module) -> list[Unit]:
    """The units whose modules lie in ``model``, in tree order."""
    return list({id(unit): unit for module in model.modules() if (unit := unit_of(module)) is not None}.values())


def contexts_in(model: nn.Module) -> list[Context]:
    """The roots that ``model`` contains or belongs to, each once.

    Raises:
        StateError: nothing in the model is sharded.
    """
    contexts = list({id(unit.context): unit.context for unit in units_in(model)}.values())
    if not contexts:
        raise StateError(
            "The model has not been sharded.",
            got=type(model).__name__,
            expected="a model given to fully_shard or FullyShardedDataParallel",
        )
    return contexts
