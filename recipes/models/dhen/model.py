"""The network: sharded tables, bottom MLP, token compression, ensemble layers, top MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recipes.models.dhen.layers import MLP, DHENLayer, TokenMix
from recipes.models.dhen.tables import EmbeddingTables
from recipes.schema.model import DHENConfig


class DHEN(nn.Module):
    """dense [B, D] float and sparse [B, T] int64 to click logits [B].

    The dense features become one token beside the T embedding tokens; all are mixed down (or up) to the layers'
    ``num_tokens``. The engine manages everything but ``tables``.
    """

    def __init__(self, config: DHENConfig, num_dense: int, table_rows: tuple[int, ...], seed: int) -> None:
        super().__init__()
        dim = config.embedding_dim
        self.tables = EmbeddingTables(table_rows, dim, getattr(torch, config.table_dtype), seed)
        self.bottom = MLP([num_dense, *config.bottom_mlp, dim]) if num_dense else None
        self.compress = TokenMix(len(table_rows) + (1 if num_dense else 0), config.num_tokens)
        self.layers = nn.ModuleList(DHENLayer(config) for _ in range(config.num_layers))
        self.top = MLP([config.num_tokens * dim, *config.top_mlp, 1])

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        if self.bottom is None:
            tokens = self.tables(sparse, dense.dtype)  # no columns, but the engine has cast it to the compute dtype
        else:
            dense_token = self.bottom(dense)  # [B, d], in the compute dtype
            tokens = torch.cat((dense_token[:, None], self.tables(sparse, dense_token.dtype)), dim=1)
        x = self.compress(tokens)  # [B, m, d]
        for layer in self.layers:
            x = layer(x)
        return self.top(x.flatten(1)).squeeze(-1)
