"""``--help`` and its kin: complete, and answered without torch, as is a config error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import Command

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "datasets", "numpy", "pyarrow", "wandb", "matplotlib")


def test_help_lists_every_group_and_preset(command: Command) -> None:
    said = command("--help")
    assert said.code == 0
    for preset in (ROOT / "configs").glob("*/*.yaml"):
        assert preset.stem in said.out, preset
        assert f"\n  {preset.parent.name} " in said.out
    for flag in ("--cfg", "--multirun", "--config-dir", "--config-name", "--info", "--resolve"):
        assert flag in said.out
    assert max(map(len, said.out.splitlines())) <= 120


def test_help_of_a_group_lists_its_keys(command: Command) -> None:
    train = command("--help", "train").out
    assert "train.steps=???" in train
    assert "optimizer steps [a whole number, at least 1, at most 1e+12]" in train
    assert "train.early_stop.patience=null" in train
    model = command("--help", "model").out
    assert "gpt_175b" in model
    assert "--help KIND" in model
    assert "model.tie_head=false" in command("-h", "gpt").out


def test_help_of_a_key_or_of_any_word(command: Command) -> None:
    assert command("--help", "train.steps").out == (
        "keys with 'train.steps'\n  train.steps=???  optimizer steps [a whole number, at least 1, at most 1e+12]\n"
    )
    patience = command("--help", "patience").out
    assert "train.early_stop.patience=null" in patience
    assert patience.rstrip().endswith("or null]")  # the line that continues it
    assert "model: presets" in command("--help", "model=gpt_tiny").out
    unknown = command("--help", "sizes_of_shoes")
    assert unknown.code == 2
    assert "nothing is called 'sizes_of_shoes'; groups are" in unknown.err


def test_help_of_a_plugins_kind(command: Command) -> None:
    shown = command(f"plugins=[{ROOT}/examples/my_model.py]", "--help", "my_model").out
    assert shown.startswith("model kind my_model: keys\n")
    assert "model.kernel_size=7  tokens that one convolution sees" in shown


def test_version(command: Command) -> None:
    assert "hydra-core 1.3" in command("--version").out


def test_hydras_help(command: Command) -> None:
    assert "--hydra-help" in command("--hydra-help").out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), (["train.stepz=3"], 2), (["action=check"], 0), (["--cfg", "job", "--resolve"], 0)],
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_answers_need_no_torch(tmp_path: Path, arguments: list[str], code: int) -> None:
    program = (
        "import json, sys\n"
        "from launcher.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = sorted({name.partition('.')[0] for name in sys.modules})\n"
        "print(json.dumps([code, heavy]), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    got, loaded = json.loads(done.stderr.splitlines()[-1])
    assert got == code
    assert not set(HEAVY) & set(loaded)
