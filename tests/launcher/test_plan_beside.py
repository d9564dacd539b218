"""A run leaves its plan beside what happened, and nothing that goes wrong with the plan goes wrong with the run."""

from __future__ import annotations

import json

import pytest

from tests.launcher.programs import PLUGIN, Program

GPT = ("model=gpt_tiny", "model.num_layers=2", "sharding.wire=collectives")


def test_a_run_is_compared_with_its_plan(program: Program) -> None:
    """Over sockets, where every gather is sent and has its buffer: bytes and the engine's memory are exact."""
    code, out, err = program.run(*GPT, "hardware=cpu", "hardware.memory_bytes_per_s=1e10", "train.micro_batch=2")
    assert code == 0, out + err
    (folder,) = program.run_dirs()
    kept = json.loads((folder / "plan.json").read_text())
    assert kept["world_size"] == 2
    assert kept["time"] is None  # no one said how fast this machine is
    rows = json.loads((folder / "summary.json").read_text())["plan"]["compared"]
    assert rows == kept["run"]["compared"]
    assert "step_s" not in rows
    for name in ("parameters_bytes", "gradients_bytes", "all_gather_bytes", "reduce_scatter_bytes", "sent_bytes"):
        assert rows[name]["ratio"] == pytest.approx(1, abs=1e-3), name
    for name in ("engine_bytes", "optimizer_bytes"):
        assert rows[name]["ratio"] == pytest.approx(1, abs=0.01), name
    assert "planned: sent in a step" in out
    assert "no step time: hardware=cpu knows too little" in out


LEAVES = """
from recipes.registry import register_model
from recipes.schema.model import GPTConfig
from dataclasses import dataclass

@dataclass
class LeavingConfig(GPTConfig):
    kind: str = "leaving"

@register_model("leaving", LeavingConfig, task="causal_lm")
class Leaving:
    @staticmethod
    def build(config, info):
        import os
        from recipes.models import gpt

        model = gpt.build(config, info)
        model.register_forward_pre_hook(lambda module, inputs: os._exit(3) if inputs[0].is_meta else None)
        return model

    @staticmethod
    def unit_classes():
        from recipes.models import gpt

        return gpt.unit_classes()
"""


def test_a_model_that_ends_its_plan_does_not_end_the_run(program: Program) -> None:
    plugin = program.folder / "leaving.py"
    plugin.write_text(LEAVES)
    sizes = ("model.num_layers=1", "model.num_heads=2", "model.hidden_size=16", "model.max_seq_len=32")
    code, out, err = program.run(f"plugins=[{PLUGIN},{plugin}]", "model=leaving", *sizes)
    assert code == 0, out + err
    (folder,) = program.run_dirs()
    assert not (folder / "plan.json").exists()
    assert "none could be made: the process that made it ended without a word" in out
