"""Whole programs on one checkpoint: evaluate, write, export, and start from what was exported; errors end with 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import compose
from launcher.checked import checked
from tests.recipes.portable.made import save_checkpoint

ROOT = Path(__file__).parents[2]
LIMIT_S = 300  # reached only by a hang
_SIZES = ("model.hidden_size=32", "model.num_layers=2", "model.num_heads=2", "model.max_seq_len=32")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and a run of a tiny GPT on it that was saved."""
    folder = tmp_path_factory.mktemp("actions")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("".join(f"the {n}th line of a small corpus\n" for n in range(400)))
    config = checked(compose.compose(["model=gpt_tiny", *_SIZES, *data_of(folder)]))
    save_checkpoint(None, config, str(folder / "run"))
    return folder


def data_of(folder: Path) -> tuple[str, ...]:
    return ("data=text_files", f"data.path={folder / 'corpus'}", f"data.cache_dir={folder / 'cache'}")


def launch(folder: Path, *words: str) -> tuple[int, str, str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *words, "cluster.device=cpu"],
        cwd=folder,
        env={**environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_evaluate_write_export_and_start_again(place: Path) -> None:
    code, out, err = launch(place, "action=eval", "checkpoint.resume=run", "train.eval_samples=8")
    assert code == 0, out + err
    (run_dir,) = (place / "runs").glob("*eval_gpt*")
    evaluation = json.loads((run_dir / "evaluation.json").read_text())
    assert f"held-out loss: {evaluation['metrics']['loss']:.6f}" in out
    assert (evaluation["step"], evaluation["num_samples"], evaluation["world_size"]) == (7, 8, 2)

    words = ("action=generate", "checkpoint.resume=run", "generate.prompt=the", "generate.max_new_tokens=5")
    code, out, err = launch(place, *words, "cluster.nproc_per_node=1")
    assert code == 0, out + err
    (run_dir,) = (place / "runs").glob("*generate_gpt*")
    assert out.rstrip("\n").endswith("the" + json.loads((run_dir / "generation.json").read_text())["text"])

    code, out, err = launch(place, "action=export", "run.dir=run", "export.dir=exported")
    assert code == 0, out + err
    assert f"model folder: {place / 'exported'}" in out
    assert not [path for path in place.iterdir() if "exporting" in path.name]

    start = ("model.init_from=exported", "train=smoke", "train.steps=1", "train.global_batch=2")
    code, out, err = launch(place, "model=gpt_tiny", *_SIZES, *data_of(place), *start)
    assert code == 0, out + err


def test_a_folder_that_only_the_ranks_can_judge_ends_with_2(place: Path, tmp_path: Path) -> None:
    """``config.json`` tells nothing here; the tensors do."""
    empty = b"{}"
    (tmp_path / "model.safetensors").write_bytes(len(empty).to_bytes(8, "little") + empty)
    words = ("model=gpt_tiny", *_SIZES, *data_of(place), f"model.init_from={tmp_path}", "train=smoke")
    code, out, err = launch(place, *words)
    assert code == 2, out + err
    assert "this model needs, and the folder has not: transformer.wte.weight" in err
    assert "Traceback" not in err
