"""The example of the engine alone, beside the plain script it was made from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fsdp_core.test_engine_page import SCRIPT, plain_script

STEPS = 20
LIMIT_S = 240  # reached only by a hang


def _train(folder: Path, name: str, text: str, *launcher: str) -> tuple[str, dict[str, torch.Tensor]]:
    """What the script printed, and the weights it saved, after ``STEPS`` steps."""
    script, saved = folder / f"{name}.py", folder / f"{name}.pt"
    assert "range(100)" in text
    script.write_text(text.replace("range(100)", f"range({STEPS})"))
    environment = {
        **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SCRIPT.parents[1]),
        "CUDA_VISIBLE_DEVICES": "",  # two ranks, whatever this machine has
    }
    command = [sys.executable, *launcher, str(script), str(saved)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, torch.load(saved)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    printed, weights = _train(tmp_path_factory.mktemp("plain"), "plain", plain_script())
    assert "step 20: loss" in printed
    return weights


def test_two_processes_train_what_the_plain_script_trains(plain: dict[str, torch.Tensor], tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    printed, weights = _train(
        tmp_path, "two", SCRIPT.read_text(), *launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"
    )
    assert printed.count("step 20: loss") == 1
    torch.testing.assert_close(weights, plain, rtol=1e-3, atol=1e-4)


def test_one_process_trains_what_the_plain_script_trains(plain: dict[str, torch.Tensor], tmp_path: Path) -> None:
    printed, weights = _train(tmp_path, "one", SCRIPT.read_text())
    assert "step 20: loss" in printed
    torch.testing.assert_close(weights, plain, rtol=1e-3, atol=1e-4)
