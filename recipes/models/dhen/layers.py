"""DHEN's dense part: interaction modules, the layer that joins them, and plain MLPs.

B samples, m feature tokens, d width of a token, l tokens that one interaction module gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.schema.model import DHENConfig


class TokenMix(nn.Linear):
    """A linear map between tokens, the same for every channel: [B, m, d] -> [B, l, d]. No bias."""

    def __init__(self, tokens_in: int, tokens_out: int) -> None:
        super().__init__(tokens_in, tokens_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class AdvancedDLRM(nn.Module):
    """Dot products of all pairs of tokens, through an MLP: [B, m, d] -> [B, l, d]."""

    pairs: Tensor  # [m (m - 1) / 2] int64: places below the diagonal of a flattened [m, m]

    def __init__(self, num_tokens: int, dim: int, hidden: int, tokens_out: int) -> None:
        super().__init__()
        self.tokens_out, self.dim = tokens_out, dim
        num_pairs = num_tokens * (num_tokens - 1) // 2
        self.hidden = nn.Linear(num_pairs, hidden)
        self.out = nn.Linear(hidden, tokens_out * dim)
        row, column = torch.tril_indices(num_tokens, num_tokens, offset=-1).unbind(0)
        self.register_buffer("pairs", row * num_tokens + column, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        products = torch.bmm(x, x.transpose(1, 2)).flatten(1)  # [B, m * m]
        y = self.out(F.relu(self.hidden(products.index_select(1, self.pairs))))
        return y.view(-1, self.tokens_out, self.dim)


class LowRankCross(nn.Module):
    """Cross layer of DCN-v2 (arXiv 2008.13535) with a low-rank matrix, then mixed down: [B, m, d] -> [B, l, d]."""

    def __init__(self, num_tokens: int, dim: int, rank: int, tokens_out: int) -> None:
        super().__init__()
        self.down = nn.Linear(num_tokens * dim, rank, bias=False)
        self.up = nn.Linear(rank, num_tokens * dim)
        self.mix = TokenMix(num_tokens, tokens_out)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        crossed = flat * self.up(self.down(flat)) + flat
        return self.mix(crossed.view_as(x))


class DHENLayer(nn.Module):
    """One unit: norm(concatenation of the modules' tokens + shortcut), [B, m, d] in and out.

    The m tokens are shared out evenly over the modules, the first ones taking what is left over. The shortcut of the
    paper is linear where a layer changes the number of tokens; here none does, so it is the identity.
    """

    def __init__(self, config: DHENConfig) -> None:
        super().__init__()
        self.interactions = nn.ModuleList(
            _interaction(kind, config, tokens_out)
            for kind, tokens_out in zip(config.modules, shares(config.num_tokens, len(config.modules)), strict=True)
        )
        self.norm = nn.LayerNorm(config.embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.cat([interaction(x) for interaction in self.interactions], dim=1) + x)


def _interaction(kind: str, config: DHENConfig, tokens_out: int) -> nn.Module:
    if kind == "advanced_dlrm":
        return AdvancedDLRM(config.num_tokens, config.embedding_dim, config.dlrm_hidden, tokens_out)
    if kind == "dcn_low_rank":
        return LowRankCross(config.num_tokens, config.embedding_dim, config.dcn_rank, tokens_out)
    raise ValueError(f"model.modules: unknown interaction module '{kind}'; known: advanced_dlrm, dcn_low_rank")


def shares(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` nearly equal numbers, larger ones first."""
    each, extra = divmod(total, parts)
    return [each + 1] * extra + [each] * (parts - extra)


class MLP(nn.Sequential):
    """Linear layers of the given widths, ReLU between them; the last one stays linear."""

    def __init__(self, widths: Sequence[int]) -> None:
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(widths):
            layers += [nn.Linear(width_in, width_out), nn.ReLU()]
        super().__init__(*layers[:-1])
