"""The models that are trained, as modules whose forward returns the loss, and their batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.data.records import DataInfo
from recipes.models import gpt
from recipes.schema.model import GPTConfig, T5Config

BATCH, SEQ_LEN = 4, 128
GPT_SIZES = {
    "34m": GPTConfig(num_layers=8, num_heads=8, hidden_size=512, vocab_size=8192, max_seq_len=SEQ_LEN),  # 33.7M
    "tiny": GPTConfig(num_layers=2, num_heads=2, hidden_size=32, vocab_size=128, max_seq_len=SEQ_LEN),
}
T5_SIZES = {
    "34m": T5Config(
        d_model=512, d_kv=64, d_ff=2048, num_heads=8, num_layers=4, num_decoder_layers=4, vocab_size=8192, dropout=0.0
    ),  # 33.6M
    "tiny": T5Config(
        d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=1, num_decoder_layers=1, vocab_size=128, dropout=0.0
    ),
}


class WithLoss(nn.Module):
    """Token ids and labels [B, S] to the mean cross entropy; the sum is taken in fp32."""

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        super().__init__()
        self.model, self.vocab_size = model, vocab_size

    def logits(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(input_ids, labels)
        return F.cross_entropy(logits.float().view(-1, self.vocab_size), labels.view(-1))


class GPTWithLoss(WithLoss):
    def logits(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids)


class T5WithLoss(WithLoss):
    def logits(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=labels).logits


def build_model(name: str, size: str) -> tuple[WithLoss, tuple[type[nn.Module], ...]]:
    """The same model on every rank, and the classes of its units."""
    torch.manual_seed(0)
    if name == "gpt":
        config = GPT_SIZES[size]
        info = DataInfo("causal_lm", vocab_size=config.vocab_size, seq_len=SEQ_LEN)
        return GPTWithLoss(gpt.build(config, info), config.vocab_size or 0), gpt.unit_classes()
    from recipes.models import t5  # imports transformers: seconds that the gpt cases need not spend

    config = T5_SIZES[size]
    info = DataInfo("seq2seq_lm", vocab_size=config.vocab_size, seq_len=SEQ_LEN, target_len=SEQ_LEN)
    return T5WithLoss(t5.build(config, info), config.vocab_size or 0), t5.unit_classes()


def batches(vocab_size: int, rank: int, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Random tokens, other ones on every rank."""
    generator = torch.Generator().manual_seed(1234 + rank)
    draw = [torch.randint(2, vocab_size, (BATCH, SEQ_LEN + 1), generator=generator) for _ in range(count)]
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in draw]


class TinyBlock(nn.Module):
    """Sixteen parameters and next to no arithmetic: what is left is the host's work."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def build_tiny_units(num_units: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(TinyBlock() for _ in range(num_units)))
