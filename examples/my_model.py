"""A model of your own: a language model of gated causal convolutions. Copy this file anywhere and change it.

fsdp-launch plugins='[./examples/my_model.py]' model=my_model
fsdp-launch plugins='[./examples/my_model.py]' model=my_model model.hidden_size=192 sharding=full_nraf
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from recipes.data.records import DataInfo
from recipes.registry import register_model
from recipes.schema import described
from recipes.schema.model import ModelConfig


@dataclass
class MyModelConfig(ModelConfig):
    """The keys below ``model``: their names, types and defaults are what YAML and the command line may say."""

    kind: str = "my_model"
    hidden_size: int = described(128, "channels", at_least=1)
    num_layers: int = described(6, "convolution blocks", at_least=1)
    kernel_size: int = described(7, "tokens that one convolution sees, itself included", at_least=1)


class ConvBlock(nn.Module):
    """Mixes each channel over earlier tokens, then channels through a gate. [B, S, D] in and out."""

    def __init__(self, config: MyModelConfig) -> None:
        super().__init__()
        self.reach = config.kernel_size - 1
        self.norm = nn.LayerNorm(config.hidden_size)
        self.over_tokens = nn.Conv1d(
            config.hidden_size, config.hidden_size, config.kernel_size, groups=config.hidden_size
        )
        self.gate = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.out = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        past_and_now = F.pad(self.norm(x).transpose(1, 2), (self.reach, 0))  # zeros before the text, nothing after
        mixed = self.over_tokens(past_and_now).transpose(1, 2)
        return x + self.out(F.glu(self.gate(mixed)))


class ConvLM(nn.Module):
    """Token ids [B, S] to logits [B, S, vocabulary]."""

    def __init__(self, config: MyModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, config.hidden_size)
        self.blocks = nn.Sequential(*(ConvBlock(config) for _ in range(config.num_layers)))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(input_ids))))


@register_model("my_model", MyModelConfig, task="causal_lm")
class MyModel:
    """What the launcher calls. Only ``build`` is needed."""

    @staticmethod
    def build(config: MyModelConfig, info: DataInfo) -> nn.Module:
        """info says what the data has: the size of the vocabulary here, the number of labels for images."""
        assert info.vocab_size is not None  # a text source always says it
        return ConvLM(config, info.vocab_size)

    @staticmethod
    def unit_classes() -> tuple[type[nn.Module], ...]:
        """Modules that are gathered and freed together. Without this function use sharding.units=size or root."""
        return (ConvBlock,)

    @staticmethod
    def forward_flops(config: MyModelConfig, info: DataInfo) -> float:
        """Of one sample, a multiply-add counting 2: for TFLOPS and MFU, which stay null without this function."""
        assert info.seq_len is not None and info.vocab_size is not None
        width = config.hidden_size
        block = 2 * width * config.kernel_size + 2 * width * 4 * width + 2 * 2 * width * width
        return float(info.seq_len * (config.num_layers * block + 2 * width * info.vocab_size))
