"""Every preset of ``configs/model``: it builds, and the arithmetic that needs no torch counts what is really built."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from recipes.data.records import DataInfo
from recipes.registry import MODELS
from recipes.schema.model import ModelConfig
from recipes.sizes import ExpectedFacts, ModelSize, model_size, num_params
from tests.recipes.models.tiny import ALL, DHEN, GPT, REGNET, T5, Tiny

FOLDER = Path(__file__).parents[3] / "configs" / "model"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
PROMISED = [
    "gpt_tiny",
    "gpt_125m",
    "gpt_1b",
    "gpt_175b",
    "t5_tiny",
    "t5_611m",
    "t5_2b",
    "t5_11b",
    "dhen_tiny",
    "dhen_paper",
    "regnet_9b",
    "deepvit_8b",
]

# What data would say, for presets that leave a size to it.
INFOS = {
    "causal_lm": DataInfo("causal_lm", vocab_size=259, seq_len=128),
    "seq2seq_lm": DataInfo("seq2seq_lm", vocab_size=359, seq_len=128, target_len=40),
    "clicks": DataInfo("clicks", num_dense=13, table_rows=(1000,) * 20 + (3, 17)),
    "images": DataInfo("images", num_classes=10),
}


def preset(name: str) -> ModelConfig:
    tree = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return MODELS[tree["kind"]].config(**tree)


def info_for(config: ModelConfig) -> DataInfo:
    """Facts of the data, but none where the preset says its own."""
    info = INFOS[MODELS[config.kind].task]
    leaves_open = getattr(config, "num_dense", None) is None
    return info if info.task != "clicks" or leaves_open else DataInfo("clicks")


def facts_of(info: DataInfo) -> ExpectedFacts:
    return ExpectedFacts(
        vocab_size=info.vocab_size,
        seq_len=info.seq_len,
        num_dense=info.num_dense,
        table_rows=info.table_rows,
        num_classes=info.num_classes,
        image_size=info.image_size,
    )


def on_meta(config: ModelConfig, info: DataInfo) -> nn.Module:
    with torch.device("meta"):
        return MODELS[config.kind].load("build")(config, info)


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def assert_counted(size: ModelSize, config: ModelConfig, model: nn.Module) -> None:
    """Unit by unit: sizes of the blocks, the root, and the tables that stay outside."""
    entry = MODELS[config.kind]
    blocks = [module for module in model.modules() if isinstance(module, entry.load("unit_classes")())]
    aside = sum(map(numel, entry.load("ignored_modules")(model))) if entry.offers("ignored_modules") else 0
    expected: Counter[int] = Counter()
    for unit in size.units:
        expected[unit.numel] += unit.count
    actual = Counter(map(numel, blocks))
    actual[numel(model) - aside - sum(map(numel, blocks))] += 1
    assert {n: count for n, count in expected.items() if count} == actual
    assert size.tables_numel == aside


def test_the_promised_presets_exist() -> None:
    assert set(PROMISED) <= set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_builds_with_the_counted_sizes(name: str) -> None:
    config = preset(name)
    info = info_for(config)
    model = on_meta(config, info)
    assert_counted(model_size(config, facts_of(info)), config, model)
    assert num_params(config, facts_of(info)) == numel(model)
    assert MODELS[config.kind].load("forward_flops")(config, info) > 0
    assert config.provenance.split(":")[0] in ("exact", "likely", "our own proposal")


@pytest.mark.parametrize(
    "tiny",
    [
        *ALL,
        GPT.with_config(tie_head=True),
        T5.with_config(tie_word_embeddings=False, feed_forward_proj="gated-gelu"),
        REGNET.with_config(layer_type="x"),
        DHEN.with_config(modules=["dcn_low_rank", "advanced_dlrm", "advanced_dlrm"]),
    ],
    ids=lambda tiny: tiny.kind,
)
def test_counted_sizes_of_variants(tiny: Tiny) -> None:
    assert_counted(model_size(tiny.config, facts_of(tiny.info)), tiny.config, on_meta(tiny.config, tiny.info))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt_175b", 175_215_501_312),
        ("t5_11b", 11_307_321_344),
        ("t5_2b", 2_280_642_560),
        ("t5_611m", 611_386_880),
        ("regnet_9b", 9_352_215_872),
        ("deepvit_8b", 7_998_269_160),
        ("dhen_paper", 550_871_297 + 768_000_000_000),
        ("gpt_125m", 124_439_808),
    ],
)
def test_counts_that_presets_state(name: str, expected: int) -> None:
    assert num_params(preset(name), ExpectedFacts()) == expected
