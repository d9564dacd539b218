"""Exporting and importing never hold the model twice: measured on 110 million parameters, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.portable.memory_probe import LARGEST_BYTES
from tests.support.ranks import ROOT

_SLACK = 48 << 20  # bytes: the piece on its way, Python, and what the allocator keeps


def probe(mode: str, tmp_path: Path) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.recipes.portable.memory_probe", mode]
    command += [str(tmp_path / "run"), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return record


@pytest.mark.full
def test_peak_memory_follows_the_largest_tensor(tmp_path: Path) -> None:
    probe("save", tmp_path)
    out, back = probe("export", tmp_path), probe("import", tmp_path)
    print(out, back)
    assert out["model_bytes"] == back["model_bytes"] > 4 * LARGEST_BYTES
    assert out["grown_bytes"] < LARGEST_BYTES + _SLACK
    assert back["grown_bytes"] < back["model_bytes"] + 2 * LARGEST_BYTES + _SLACK
