"""Where the modules of a unit keep its parameters: full tensors are shown there while the unit runs."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from torch import Tensor, nn

from fsdp_core.errors import StateError
from fsdp_core.handle.flat_param_handle import FlatParamHandle
from fsdp_core.handle.sharded_tensor import ShardedTensor
from fsdp_core.runtime.names import join, walk
from fsdp_core.runtime.recurrent import forget_weights


class ParameterSites:
    """``position`` counts the parameters of all handles in order."""

    def __init__(self, handles: Sequence[FlatParamHandle]) -> None:
        self._handles = handles
        every = [places for handle in handles for places in handle.places]
        self._sites = [
            (place.module.__dict__, place.name, position) for position, places in enumerate(every) for place in places
        ]
        holders = (place.module for places in every for place in places)
        self._recurrent = tuple({module: None for module in holders if isinstance(module, nn.RNNBase)})

    def show(self, tensors: Sequence[Tensor]) -> None:
        """Let the modules see the full tensors: an instance attribute wins over ``Module.__getattr__``."""
        for attributes, name, position in self._sites:
            attributes[name] = tensors[position]

    def hide(self) -> None:
        for attributes, name, _ in self._sites:
            attributes.pop(name, None)
        self.forget_copies()

    def forget_copies(self) -> None:
        """Recurrent modules keep a list of their weights."""
        for module in self._recurrent:
            forget_weights(module)

    def check(self, unit: str) -> None:
        """Raises ``StateError`` where a parameter was replaced after sharding."""
        for handle in self._handles:
            for parameter, places in zip(handle.params, handle.places, strict=True):
                for place in places:
                    found: Any = dict.get(place.module._parameters, place.name)
                    if found is not parameter:
                        raise StateError(
                            "A parameter was replaced after the module was sharded.",
                            unit=unit,
                            parameter=place.fqn,
                            expected="the sharded parameter that fully_shard put there",
                            got=type(found).__name__,
                            remedy="replace parameters before sharding, or write into them inside "
                            "`with fsdp_core.full_parameters(model):`",
                        )


def check_owned(root: nn.Module, ignored: Set[nn.Module]) -> None:
    """Raises ``StateError`` for modules that came after sharding: they would train on each rank by itself."""
    for name, module in walk(root):
        for key, parameter in module._parameters.items() if module not in ignored else ():
            if parameter is not None and parameter.requires_grad and not isinstance(parameter, ShardedTensor):
                raise StateError(
                    "A parameter was added or replaced after the model was sharded: it belongs to no unit, and its "
                    "gradient would be another one on each rank.",
                    parameter=join(name, key),
                    expected="modules that were there when the model was sharded, or in ignored_modules",
                    got=f"{type(module).__name__}, put in later",
                    remedy="change the model before fully_shard",
                )
