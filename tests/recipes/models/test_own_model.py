"""The documented example of a user's own model, outside the packages."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recipes.data.records import DataInfo
from recipes.registry import MODELS, Entry
from recipes.tasks import task_for
from tests.recipes.models.tiny import Tiny

FILE = Path(__file__).parents[3] / "examples" / "my_model.py"
INFO = DataInfo("causal_lm", vocab_size=50, seq_len=16)


@pytest.fixture
def entry() -> Iterator[Entry]:
    spec = importlib.util.spec_from_file_location("example_my_model", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["example_my_model"] = module
    spec.loader.exec_module(module)
    yield MODELS["my_model"]
    MODELS.discard("my_model")
    del sys.modules["example_my_model"]


def test_it_is_registered_with_its_functions(entry: Entry) -> None:
    assert entry.task == "causal_lm"
    assert [name for name in ("build", "unit_classes", "forward_flops") if entry.offers(name)] == [
        "build",
        "unit_classes",
        "forward_flops",
    ]
    assert not entry.offers("extra_optimizers")
    assert entry.config().kind == "my_model"


def test_it_trains_and_sees_no_later_token(entry: Entry) -> None:
    config = entry.config(hidden_size=32, num_layers=2)
    tiny = Tiny("my_model", config, INFO, num_units=2)
    model, batch = tiny.build(), tiny.batch(8)
    assert len(tiny.unit_modules(model)) == tiny.num_units
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(30):
        loss = tiny.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    changed = batch["input_ids"].clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    assert torch.equal(model(changed)[:, :9], model(batch["input_ids"])[:, :9])


def test_its_flops(entry: Entry) -> None:
    tiny = Tiny("my_model", entry.config(hidden_size=32, num_layers=2, kernel_size=5), INFO, num_units=2)
    model, task = tiny.build(), task_for("causal_lm", INFO)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        task.logits(model, tiny.batch(1))
    assert counter.get_total_flops() == tiny.flops()
