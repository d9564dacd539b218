"""GPT in the style of minGPT: pre-norm blocks, tanh-GELU, learned positions, a head of its own without bias.

B samples, S tokens of a sample, D hidden size, H heads, V vocabulary, L blocks.

Parameters: a block has 12 D^2 + 13 D, the root (embeddings, last norm, head) 2 V D + max_seq_len D + 2 D; with
D = 12288, L = 96, V = 50000 and 2048 positions that is 175,215,501,312, the count of minGPT at the sizes of
GPT-3 (arXiv 2005.14165) in "PyTorch FSDP" (arXiv 2304.11277).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.data.records import DataInfo
from recipes.models.initialised import NormalEmbedding, NormalLinear
from recipes.models.sizes_from_data import at_least_as_data
from recipes.schema.model import GPTConfig

INIT_STD = 0.02  # of GPT-2


class CausalAttention(nn.Module):
    """Self-attention over earlier tokens.

    ``kernels=fused``: no [S, S] matrix is kept. ``explicit``: as in minGPT; scores, probabilities and the dropout mask
    are tensors [B, H, S, S], and every block keeps a triangle of its own. The function is the same, but for the order
    of sums and the random numbers of dropout.
    """

    triangle: Tensor

    def __init__(self, config: GPTConfig, out_std: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = config.num_heads, config.dropout
        self.is_explicit = config.kernels == "explicit"
        self.qkv = NormalLinear(config.hidden_size, 3 * config.hidden_size, std=INIT_STD)
        self.out = NormalLinear(config.hidden_size, config.hidden_size, std=out_std)
        if self.is_explicit:
            ones = torch.ones(config.max_seq_len, config.max_seq_len)
            self.register_buffer("triangle", ones.tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq_len, hidden = x.shape
        qkv = self.qkv(x).view(batch, seq_len, 3, self.num_heads, hidden // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, S, D/H]
        dropout = self.dropout if self.training else 0.0
        if self.is_explicit:
            y = explicit_attention(q, k, v, self.triangle[:seq_len, :seq_len] == 0, dropout)
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq_len, hidden))


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, is_hidden: Tensor, dropout: float) -> Tensor:
    """One operation after the other. q, k, v [B, H, S, D/H]; is_hidden [S, S]: keys that a query does not see."""
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(q.shape[-1]))
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
    return F.dropout(weights, dropout, training=dropout > 0) @ v


class FeedForward(nn.Module):
    """Four times wider inside."""

    def __init__(self, config: GPTConfig, out_std: float) -> None:
        super().__init__()
        self.is_explicit = config.kernels == "explicit"
        self.up = NormalLinear(config.hidden_size, 4 * config.hidden_size, std=INIT_STD)
        self.down = NormalLinear(4 * config.hidden_size, config.hidden_size, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.up(x)
        return self.down(explicit_gelu(inside) if self.is_explicit else F.gelu(inside, approximate="tanh"))


def explicit_gelu(x: Tensor) -> Tensor:
    """The tanh approximation, one operation after the other."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3.0))
    return 0.5 * x * (1.0 + inner.tanh())


class Block(nn.Module):
    """One unit: attention, then feed-forward, each on a normalised copy of the residual stream. [B, S, D] in and out.

    The two projections that write to the residual stream start 1/sqrt(2 L) smaller, so that its variance at the
    last block does not grow with the depth.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        out_std = INIT_STD / math.sqrt(2 * config.num_layers)
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = CausalAttention(config, out_std)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size)
        self.feed_forward = FeedForward(config, out_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class GPT(nn.Module):
    """Token ids [B, S] to logits [B, S, V]; position i predicts token i + 1."""

    def __init__(self, config: GPTConfig, vocab_size: int) -> None:
        super().__init__()
        self.max_seq_len = config.max_seq_len
        self.token_embedding = NormalEmbedding(vocab_size, config.hidden_size, std=INIT_STD)
        self.position_embedding = NormalEmbedding(config.max_seq_len, config.hidden_size, std=INIT_STD)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        self.head = NormalLinear(config.hidden_size, vocab_size, std=INIT_STD, bias=False)
        if config.tie_head:
            self.head.weight = self.token_embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        seq_len = input_ids.shape[1]
        if seq_len > self.max_seq_len:
            raise ValueError(f"a sequence of {seq_len} tokens; the model has {self.max_seq_len} positions")
        positions = torch.arange(seq_len, device=input_ids.device)
        x = self.dropout(self.token_embedding(input_ids) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def build(config: GPTConfig, info: DataInfo) -> GPT:
    """Raises ValueError if the sizes contradict each other or the data."""
    if config.hidden_size % config.num_heads:
        raise ValueError(
            f"model.hidden_size ({config.hidden_size}) is no multiple of model.num_heads ({config.num_heads})"
        )
    if info.seq_len is not None and info.seq_len > config.max_seq_len:
        raise ValueError(f"data.seq_len is {info.seq_len}; the model has {config.max_seq_len} positions")
    return GPT(config, at_least_as_data("model.vocab_size", config.vocab_size, info.vocab_size))


def unit_classes() -> tuple[type[nn.Module], ...]:
    return (Block,)


def forward_flops(config: GPTConfig, info: DataInfo) -> float:
    """L (24 S D^2 + 4 S^2 D) + 2 S D V: matrix products only, the causal half of attention not subtracted."""
    seq_len = info.seq_len or config.max_seq_len
    vocab_size = at_least_as_data("model.vocab_size", config.vocab_size, info.vocab_size)
    return unit_forward_flops(config, info) + 2.0 * seq_len * config.hidden_size * vocab_size


def unit_forward_flops(config: GPTConfig, info: DataInfo) -> float:
    """The blocks' part of it: what activation checkpointing runs again."""
    seq_len, hidden = info.seq_len or config.max_seq_len, config.hidden_size
    return float(config.num_layers * (24 * seq_len * hidden**2 + 4 * seq_len**2 * hidden))
