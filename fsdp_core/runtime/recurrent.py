"""RNN, LSTM and GRU keep a second list of their weights, which has to follow what the unit shows them.

The module compares the list with its attributes at each forward, by weak references, and makes it anew when they
differ. So it is enough to let the references differ, and to empty the list when the unit takes its full tensors
back: else the list would keep the gathered buffer in use.
"""

from __future__ import annotations

from torch import nn


def _gone() -> None:
    """A weak reference whose tensor is no more."""


def _leave_in_place() -> None:
    """Instead of ``flatten_parameters``: cuDNN's would move the weights out of the gathered buffer, at each forward."""


def follow_unit(module: nn.RNNBase) -> None:
    """Once, before the parameters become sharded: no weak reference may be left, they forbid swapping tensors."""
    module.__dict__["flatten_parameters"] = _leave_in_place
    forget_weights(module)


def forget_weights(module: nn.RNNBase) -> None:
    """The next forward reads its weights anew."""
    module.__dict__["_flat_weights"] = []
    module.__dict__["_flat_weight_refs"] = [_gone] * len(module._flat_weights_names)
