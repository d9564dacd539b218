"""The benchmark of checkpoints still runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import ROOT


@pytest.mark.full
def test_smoke(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/checkpoint.py", "--smoke", "--dir", str(tmp_path), "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (raw,) = tmp_path.glob("*-checkpoint-smoke.json")
    data = json.loads(raw.read_text())
    assert {name: len(times) for name, times in data["times"].items()} == dict.fromkeys(data["times"], 1)
    assert data["bytes"] > 12 * data["parameters"]  # parameters and two moments in float32
    assert "**stolen per save**, paired" in run.stdout
