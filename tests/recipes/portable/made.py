"""Tiny models, their checkpoints and their folders; what ranks run in these tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

import fsdp_core
from recipes.build import build_sharded, build_trainee
from recipes.checkpoint.checkpointer import Checkpointer, TrainState
from recipes.data.records import DataInfo
from recipes.data.text import text_info
from recipes.models.own_shards import OwnShards
from recipes.ranks import Ranks
from recipes.registry import MODELS
from recipes.schema import RecipeConfig
from recipes.schema.data import StdlibTextConfig
from recipes.schema.training import AdamWConfig
from tests.recipes.loop.recipes_in_tests import context_of
from tests.support.ranks import ROOT, Rank

SEQ_LEN, TARGET_LEN = 32, 16
FACTS = {
    "clicks": DataInfo("clicks", num_dense=5, table_rows=(10, 3, 100, 1, 7)),
    "images": DataInfo("images", num_classes=6, image_size=32),
}


def config_of(preset: str, **changes: Any) -> RecipeConfig:
    """A model preset on bytes of text; ``changes`` of fields of its model, and ``factor``, ``init``, ``units``."""
    config = RecipeConfig()
    tree = yaml.safe_load((ROOT / "configs" / "model" / f"{preset}.yaml").read_text())
    for name in ("factor", "init", "units", "reshard_after_forward"):
        if name in changes:
            setattr(config.sharding, name, changes.pop(name))
    config.model = MODELS[tree["kind"]].config(**(tree | changes))
    config.data, config.optimizer = StdlibTextConfig(seq_len=SEQ_LEN), AdamWConfig(lr=1e-3)
    config.train.steps, config.train.global_batch = 4, 4
    return config


def info_of(config: RecipeConfig) -> DataInfo:
    task = MODELS[config.model.kind].task
    if task in FACTS:
        return FACTS[task]
    info = text_info(config.data, task, getattr(config.model, "max_seq_len", None))
    assert info is not None
    return info


def built(rank: Rank | None, config: RecipeConfig) -> nn.Module:
    context = context_of(rank)
    return build_sharded(config, context, Ranks.of(context), info_of(config)).model


def save_checkpoint(rank: Rank | None, config: RecipeConfig, run_dir: str, seed: int = 3) -> str:
    """A checkpoint of ``config`` after "step 7", its parameters and buffers moved off their first values."""
    context = context_of(rank)
    ranks = Ranks.of(context)
    trainee = build_trainee(config, context, ranks, info_of(config)).trainee
    with torch.no_grad():
        for number, parameter in enumerate(trainee.model.parameters()):
            parameter.mul_(1.0 + 0.01 * (seed + number % 5))
    tree = dataclasses.asdict(config)
    root = Path(run_dir) / "checkpoints"
    saver = Checkpointer(root, trainee, ranks, config.checkpoint, attempt=0, config_tree=tree)
    saver.save(TrainState(7, {}, {}))
    saver.wait()
    return str(root / "step_00000007")


def whole_state(rank: Rank | None, config: RecipeConfig) -> dict[str, Tensor]:
    """What a model built from ``config`` holds: whole tensors; of tables this rank's rows, by name and first row."""
    model = built(rank, config)
    state = {name: tensor.clone() for name, tensor in fsdp_core.state_dict(model).items() if "tables." not in name}
    for name, module in model.named_modules():
        if isinstance(module, OwnShards):
            state |= {f"{name}.{shard.name}@{shard.start}": shard.values.clone() for shard in module.shards()}
    return state


def whole_states(rank: Rank, configs: list[RecipeConfig]) -> list[dict[str, Tensor]]:
    return [whole_state(rank, config) for config in configs]


def logits(model: nn.Module, config: RecipeConfig) -> Tensor:
    """Of ids that follow from nothing but the model's vocabulary."""
    generator = torch.Generator().manual_seed(5)
    vocab_size = info_of(config).vocab_size
    source = torch.randint(3, vocab_size, (2, SEQ_LEN), generator=generator)
    target = torch.randint(3, vocab_size, (2, TARGET_LEN), generator=generator)
    model.eval()
    with torch.no_grad():
        if config.model.kind == "t5":
            return model(input_ids=source, labels=target).logits
        output = model(source)
        return output if isinstance(output, Tensor) else output.logits
