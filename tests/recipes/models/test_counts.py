"""The parameter counts that the presets promise, from models built without memory, unit by unit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from recipes.data.records import DataInfo
from recipes.registry import MODELS
from recipes.schema.model import DeepViTConfig, DHENConfig, GPTConfig, ModelConfig, RegNetConfig, T5Config


def t5(d_model: int, d_kv: int, d_ff: int, num_heads: int, num_layers: int) -> T5Config:
    return T5Config(
        d_model=d_model,
        d_kv=d_kv,
        d_ff=d_ff,
        num_heads=num_heads,
        num_layers=num_layers,
        num_decoder_layers=num_layers,
        vocab_size=32128,
    )


PAPER = {
    "gpt_175b": GPTConfig(num_layers=96, num_heads=96, hidden_size=12288, vocab_size=50000, max_seq_len=2048),
    "t5_11b": t5(1024, 128, 65536, 128, 24),
    "t5_2b": t5(2048, 64, 5120, 32, 24),
    "t5_611m": t5(1280, 64, 3584, 20, 15),
    "regnet_9b": RegNetConfig(
        depths=[2, 7, 17, 1], hidden_sizes=[2020, 4040, 11110, 28280], groups_width=1010, num_classes=1000
    ),
    "deepvit_8b": DeepViTConfig(
        image_size=256, patch_size=32, num_classes=1000, hidden_size=1024, num_layers=952, num_heads=16, mlp_size=2048
    ),
    "dhen_paper": DHENConfig(
        num_layers=8,
        embedding_dim=128,
        num_tokens=128,
        dlrm_hidden=2048,
        dcn_rank=914,
        bottom_mlp=[4096, 4096],
        top_mlp=[1024, 1024],
        num_dense=2048,
        num_tables=600,
        rows_per_table=10_000_000,
        table_dtype="float16",
    ),
}
EXPECTED = {
    "gpt_175b": 175_215_501_312,
    "t5_11b": 11_307_321_344,
    "t5_2b": 2_280_642_560,
    "t5_611m": 611_386_880,
    "regnet_9b": 9_352_215_872,
    "deepvit_8b": 7_998_269_160,
    "dhen_paper": 550_871_297 + 768_000_000_000,
}
# The first block of each T5 stack also holds the stack's 32 x heads relative position biases.
EXPECTED_UNITS = {
    "gpt_175b": {1_812_099_072: 96},
    "t5_11b": {201_328_640: 23, 201_328_640 + 4096: 1, 268_438_528: 23, 268_438_528 + 4096: 1},
    "t5_2b": {37_752_832: 23, 37_752_832 + 1024: 1, 54_532_096: 23, 54_532_096 + 1024: 1},
    "t5_611m": {15_731_200: 14, 15_731_200 + 640: 1, 22_286_080: 14, 22_286_080 + 640: 1},
    "deepvit_8b": {4_197_664: 952, 4_199_424: 952},
    "dhen_paper": {63_408_384: 8},
}
EXPECTED_FORWARD_FLOPS = {
    "gpt_175b": 734_791_326_498_816,
    "t5_11b": 12_815_511_322_624,
    "t5_2b": 2_489_738_854_400,
    "t5_611m": 686_355_906_560,
    "deepvit_8b": 1_056_708_423_680,
    "dhen_paper": 1_171_478_786,
}


def no_facts(config: ModelConfig) -> DataInfo:
    """Data that says nothing: every size must come from the config."""
    return DataInfo(MODELS[config.kind].task)


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture(scope="module", params=PAPER)
def built(request: pytest.FixtureRequest) -> tuple[str, ModelConfig, nn.Module]:
    config = PAPER[request.param]
    with torch.device("meta"):
        return request.param, config, MODELS[config.kind].load("build")(config, no_facts(config))


def test_total(built: tuple[str, ModelConfig, nn.Module]) -> None:
    name, _, model = built
    assert numel(model) == EXPECTED[name]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_units(built: tuple[str, ModelConfig, nn.Module]) -> None:
    name, config, model = built
    classes = MODELS[config.kind].load("unit_classes")()
    units = Counter(numel(module) for module in model.modules() if isinstance(module, classes))
    if name == "regnet_9b":
        assert sum(units.values()) == 27
    else:
        assert units == EXPECTED_UNITS[name]


def test_root_of_dhen_paper_and_its_tables() -> None:
    config = PAPER["dhen_paper"]
    with torch.device("meta"):
        model = MODELS["dhen"].load("build")(config, no_facts(config))
    (tables,) = MODELS["dhen"].load("ignored_modules")(model)
    assert numel(tables) == tables.num_rows * 128 == 768_000_000_000
    assert tables.weight.dtype is torch.float16
    assert numel(model) - numel(tables) - 8 * 63_408_384 == 43_604_225


@pytest.mark.parametrize("name", EXPECTED_FORWARD_FLOPS)
def test_forward_flops(name: str) -> None:
    config = PAPER[name]
    assert MODELS[config.kind].load("forward_flops")(config, no_facts(config)) == EXPECTED_FORWARD_FLOPS[name]
