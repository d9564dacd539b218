"""One tiny model of each kind, with facts of matching data and a batch: what every test of models starts from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from recipes.data.records import Batch, DataInfo
from recipes.registry import MODELS
from recipes.schema.model import DeepViTConfig, DHENConfig, GPTConfig, ModelConfig, RegNetConfig, T5Config
from recipes.tasks import task_for


@dataclass(frozen=True)
class Tiny:
    """config and info as ``build`` takes them. num_units: of its ``unit_classes``."""

    kind: str
    config: ModelConfig
    info: DataInfo
    num_units: int

    def build(self) -> nn.Module:
        """The same weights every time."""
        torch.manual_seed(1)
        return MODELS[self.kind].load("build")(self.config, self.info)

    def flops(self) -> float:
        return MODELS[self.kind].load("forward_flops")(self.config, self.info)

    def unit_modules(self, model: nn.Module) -> list[nn.Module]:
        classes = MODELS[self.kind].load("unit_classes")()
        return [module for module in model.modules() if isinstance(module, classes)]

    def batch(self, num_samples: int, seed: int = 0) -> Batch:
        """Random samples, learnable by heart."""
        generator = torch.Generator().manual_seed(seed)
        info = self.info

        def tokens(length: int) -> Tensor:
            return torch.randint(2, info.vocab_size, (num_samples, length), generator=generator)

        if info.task == "causal_lm":
            text = tokens(info.seq_len + 1)
            return {"input_ids": text[:, :-1], "labels": text[:, 1:]}
        if info.task == "seq2seq_lm":
            return {"input_ids": tokens(info.seq_len), "labels": tokens(info.target_len)}
        if info.task == "clicks":
            columns = [torch.randint(rows, (num_samples,), generator=generator) for rows in info.table_rows]
            return {
                "dense": torch.randn(num_samples, info.num_dense, generator=generator),
                "sparse": torch.stack(columns, dim=1),
                "labels": torch.randint(2, (num_samples,), generator=generator).float(),
            }
        side = info.image_size
        return {
            "pixels": torch.randn(num_samples, 3, side, side, generator=generator),
            "labels": torch.randint(info.num_classes, (num_samples,), generator=generator),
        }

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean over counted targets."""
        task = task_for(self.info.task, self.info)
        return task.loss_sum(task.logits(model, batch), batch["labels"]) / task.count_targets(batch)

    def with_config(self, **changes: object) -> Tiny:
        return replace(self, config=replace(self.config, **changes))


GPT = Tiny(
    "gpt",
    GPTConfig(num_layers=2, num_heads=4, hidden_size=32, max_seq_len=24),
    DataInfo("causal_lm", vocab_size=50, seq_len=16),
    num_units=2,
)
T5 = Tiny(
    "t5",
    T5Config(d_model=32, d_kv=8, d_ff=48, num_heads=5, num_layers=2, num_decoder_layers=3, dropout=0.0),
    DataInfo("seq2seq_lm", vocab_size=50, seq_len=16, target_len=8, pad_id=0, eos_id=1),
    num_units=5,
)
DHEN = Tiny(
    "dhen",
    DHENConfig(
        num_layers=2,
        embedding_dim=8,
        num_tokens=7,
        dlrm_hidden=24,
        dcn_rank=5,
        bottom_mlp=[16, 12],
        top_mlp=[20],
    ),
    DataInfo("clicks", num_dense=5, table_rows=(10, 3, 100, 1, 7)),
    num_units=2,
)
REGNET = Tiny(
    "regnet",
    RegNetConfig(depths=[1, 2], hidden_sizes=[16, 24], groups_width=8, embedding_size=12, image_size=20),
    DataInfo("images", num_classes=6, image_size=20),
    num_units=3,
)
DEEPVIT = Tiny(
    "deepvit",
    DeepViTConfig(image_size=24, patch_size=8, hidden_size=32, num_layers=2, num_heads=3, head_dim=8, mlp_size=40),
    DataInfo("images", num_classes=6, image_size=24),
    num_units=4,
)
ALL = [GPT, T5, DHEN, REGNET, DEEPVIT]
