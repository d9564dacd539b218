"""Tiny configs of the presets, with data whose shapes are known without reading it, on the A100's profile."""

from __future__ import annotations

from typing import Any

import yaml

from recipes.registry import MODELS
from recipes.schema import RecipeConfig
from recipes.schema.data import DataConfig, StdlibTextConfig, SyntheticClicksConfig, SyntheticImagesConfig
from recipes.schema.training import AdamWConfig, HardwareConfig
from tests.support.ranks import ROOT

DATA: dict[str, DataConfig] = {
    "gpt": StdlibTextConfig(seq_len=32),
    "t5": StdlibTextConfig(seq_len=32),
    "dhen": SyntheticClicksConfig(num_tables=4, rows_per_table=64, num_dense=5),
    "regnet": SyntheticImagesConfig(),
    "deepvit": SyntheticImagesConfig(),
}
SMALLER: dict[str, dict[str, Any]] = {
    "gpt": {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "max_seq_len": 32},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 1},
}


def profile(name: str = "a100_80gb") -> HardwareConfig:
    values = yaml.safe_load((ROOT / "configs" / "hardware" / f"{name}.yaml").read_text())
    return HardwareConfig(
        **{
            key: float(value) if isinstance(value, str) and key not in ("name", "device") else value
            for key, value in values.items()
        }
    )


def tiny(kind: str, **changes: Any) -> RecipeConfig:
    """``changes`` by dotted path with __ for dots."""
    config = RecipeConfig()
    preset = yaml.safe_load((ROOT / "configs" / "model" / f"{kind}_tiny.yaml").read_text())
    config.model = MODELS[kind].config(**{**preset, **SMALLER.get(kind, {})})
    config.data = DATA[kind]
    config.optimizer = AdamWConfig(lr=1e-3)
    config.hardware = profile()
    config.train.steps, config.train.global_batch = 20, 8
    for path, value in changes.items():
        *folders, name = path.split("__")
        owner: Any = config
        for folder in folders:
            owner = getattr(owner, folder)
        assert name in vars(owner), path
        setattr(owner, name, value)
    return config
