"""Two transformers in the shapes of the presets gpt_tiny and t5_tiny, and text that is more than noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recipes.data.records import Batch, DataInfo
from recipes.registry import MODELS
from recipes.schema.model import GPTConfig, T5Config
from tests.recipes.models.tiny import Tiny

SEQ_LEN = 32
TARGET_LEN = 16
VOCAB = 259  # bytes and three special tokens

GPT_TINY = Tiny(
    "gpt",
    GPTConfig(num_layers=4, num_heads=4, hidden_size=128, max_seq_len=256, dropout=0.0),
    DataInfo("causal_lm", vocab_size=VOCAB, seq_len=SEQ_LEN),
    num_units=4,
)
# Gated GELU instead of the preset's ReLU: a unit of a ReLU whose input is near zero is on or off by the order in which
# gradients were summed. Plain torch, summing four ranks' gradients in pairs, ended 4e-4 from summing them in a row.
T5_SIZES = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
T5_TINY = Tiny(
    "t5",
    T5Config(**T5_SIZES, dropout=0.0, feed_forward_proj="gated-gelu"),
    DataInfo("seq2seq_lm", vocab_size=VOCAB, seq_len=SEQ_LEN, target_len=TARGET_LEN, pad_id=0, eos_id=1),
    num_units=4,
)
MODELS_BY_NAME = {"gpt_tiny": GPT_TINY, "t5_tiny": T5_TINY}


@dataclass(frozen=True)
class Corpus:
    """Counting in steps, one token in ten wrong: [num_sequences, length] per step, the same on every rank."""

    num_sequences: int
    length: int

    def text(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)

        def draw(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        start, stride = draw(0, 200, self.num_sequences, 1), draw(1, 8, self.num_sequences, 1)
        text = 3 + (start + stride * torch.arange(self.length)) % (VOCAB - 3)
        is_wrong = torch.rand(text.shape, generator=generator) < 0.1
        return torch.where(is_wrong, draw(3, VOCAB, *text.shape), text)


def batch_of(kind: str, step: int, num_sequences: int) -> Batch:
    """The global batch of one step."""
    if kind == "gpt":
        text = Corpus(num_sequences, SEQ_LEN + 1).text(step)
        return {"input_ids": text[:, :-1], "labels": text[:, 1:]}
    text = Corpus(num_sequences, SEQ_LEN + TARGET_LEN).text(step)
    return {"input_ids": text[:, :SEQ_LEN], "labels": text[:, SEQ_LEN:]}


def rows_of(batch: Batch, rank: int, num_ranks: int) -> Batch:
    """This rank's equal part."""
    return {name: value.chunk(num_ranks)[rank] for name, value in batch.items()}


def unit_classes(tiny: Tiny) -> tuple[type[nn.Module], ...]:
    classes: tuple[type[nn.Module], ...] = MODELS[tiny.kind].load("unit_classes")()
    return classes


def without_true_zeros(name: str, value: Tensor) -> Tensor:
    """A key bias adds the same to every score of a query, which softmax cannot see: its true gradient is zero, and
    under Adam rounding decides where it goes. It is the middle third of the fused bias."""
    if name.endswith("attention.qkv.bias"):
        query, _, values = value.chunk(3)
        return torch.cat([query, values])
    return value
