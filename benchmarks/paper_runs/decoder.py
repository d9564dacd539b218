"""The model of the small experiments: a decoder whose every leaf module holds exactly one parameter, so that units can
be cut anywhere from the whole model to single parameters. B samples, S tokens, D width, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_WIDTH = 32


@dataclass(frozen=True)
class Sizes:
    """A block has 12 D^2 + 2 D parameters, what is around the blocks 2 V D + D."""

    layers: int = 8
    width: int = 256
    vocab: int = 512
    batch: int = 2  # per rank
    seq_len: int = 128


class Block(nn.Module):
    """Attention over earlier tokens, then feed-forward. [B, S, D] in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.second_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        heads = [self._heads(layer(normed)) for layer in (self.query, self.key, self.value)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))

    @staticmethod
    def _heads(x: Tensor) -> Tensor:
        """[B, S, D] to [B, H, S, D/H]."""
        return x.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)


class Decoder(nn.Module):
    """Tokens [B, S + 1] to the mean cross entropy of each next one, in nats. Without positions: order is seen through
    the causal mask alone, which is enough here."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes.width) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


def build(sizes: Sizes, seed: int = 0) -> Decoder:
    """The same on every rank."""
    torch.manual_seed(seed)
    return Decoder(sizes)


def random_batches(sizes: Sizes, rank: int, count: int = 4) -> list[Tensor]:
    """Other tokens on every rank; [B, S + 1] each."""
    generator = torch.Generator().manual_seed(1234 + rank)
    shape = (sizes.batch, sizes.seq_len + 1)
    return [torch.randint(sizes.vocab, shape, generator=generator) for _ in range(count)]


def units_of(model: Decoder, cut: str) -> list[tuple[nn.Module, ...]]:
    """Groups of modules that are units below the root. cut: ``one`` (none: the root is everything), ``N`` (every N
    blocks), ``layers`` (norms and matrices on their own: one parameter each)."""
    if cut == "one":
        return []
    if cut == "layers":
        return [(module,) for module in model.modules() if not list(module.children())]
    each, blocks = int(cut), list(model.blocks)
    return [tuple(blocks[first : first + each]) for first in range(0, len(blocks), each)]
