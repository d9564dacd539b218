"""A wheel, built from the tracked files and installed into another environment, trains from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.launcher.programs import LIMIT_S, ROOT
from tests.test_guard_rails import tracked

PACKAGES = ("launcher", "recipes", "fsdp_core", "configs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building writes beside the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in tracked():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    _quietly(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_the_packages_and_their_presets_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for path in tracked():
        relative = path.relative_to(ROOT)
        if relative.parts[0] in PACKAGES and relative.suffix in (".py", ".yaml"):
            assert str(relative) in names
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, "fsdp_launcher-0.1.0.dist-info"}
    assert "fsdp_core/py.typed" in names
    assert "recipes/py.typed" in names


def test_an_installed_wheel_trains_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    _quietly(sys.executable, "-m", "venv", "--without-pip", str(environment))
    # Everything but ours comes from this environment: a path line, which does not activate its editable install.
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet")
    _quietly(*pip, str(wheel))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "text.txt").write_text("".join(f"the {n}th line of a small corpus\n" for n in range(400)))
    done = subprocess.run(
        [
            environment / "bin" / "fsdp-launch",
            *("data=text_files", "data.path=text.txt", f"data.cache_dir={tmp_path / 'cache'}", "train=smoke"),
            *("model.num_layers=1", "model.hidden_size=16", "model.max_seq_len=32", "train.steps=2"),
            *("run.name=wheel", "cluster.device=cpu"),
        ],
        cwd=elsewhere,
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (elsewhere / "runs").iterdir()
    assert (run_dir / "metrics.jsonl").exists()
    assert (run_dir / "revision.txt").read_text() == "fsdp-launcher 0.1.0, not a git checkout\n"


def _quietly(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
