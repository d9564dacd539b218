"""Layers that draw their weights once, from the distribution the model wants.

``nn.Linear`` and ``nn.Embedding`` initialise themselves when built; drawing a second time over that costs a large
model as much again and doubles what deferred initialisation has to record. These draw from N(0, std) right away, and
not at all on the meta device, where drawing means nothing but takes a millisecond (torch's kernel for it is Python).
"""

from __future__ import annotations

from torch import Tensor, nn


def normal_(tensor: Tensor, std: float = 1.0) -> None:
    """Fill a parameter from N(0, std), unless it has no values."""
    if not tensor.is_meta:
        nn.init.normal_(tensor, std=std)


class NormalLinear(nn.Linear):
    """``nn.Linear`` with weights from N(0, std) and a zero bias."""

    def __init__(self, in_features: int, out_features: int, *, std: float, bias: bool = True) -> None:
        self.std = std  # read by reset_parameters, which the base class calls
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        normal_(self.weight, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class NormalEmbedding(nn.Embedding):
    """``nn.Embedding`` with rows from N(0, std)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        normal_(self.weight, self.std)
