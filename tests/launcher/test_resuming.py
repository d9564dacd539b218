"""Going on from a checkpoint, before a rank starts: what is refused, what is told, what is set aside."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from launcher.resuming import lines, take_back
from launcher.schema import Config
from recipes.checkpoint.folder import COMPLETE, MANIFEST, marker_text
from recipes.checkpoint.manifest import Manifest
from tests.launcher.conftest import Command

WORDS = ("model=gpt_tiny", "train.steps=100", "scheduler=constant", "scheduler.warmup_steps=5")


def save(run_dir: Path, config: Config, step: int, world_size: int = 2) -> Path:
    """A checkpoint without tensors: the launcher reads its manifest alone."""
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    tree = json.loads(json.dumps(dataclasses.asdict(config)))
    manifest = Manifest(step, world_size, 1, {}, {}, [], tree, {}, []).as_json()
    (folder / MANIFEST).write_bytes(manifest)
    (folder / COMPLETE).write_text(marker_text(step, manifest, None))
    (run_dir / "config.yaml").write_text("{}")
    return folder


@pytest.fixture
def saved(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has a checkpoint of step 40."""
    run_dir = tmp_path_factory.mktemp("elsewhere") / "run"
    launched = command(*WORDS).launched
    assert launched is not None
    save(run_dir, launched[0], 40)
    return run_dir


def test_every_refused_difference_is_told_with_both_values(command: Command, saved: Path) -> None:
    said = command(*WORDS, f"run.dir={saved}", "optimizer.lr=0.5", "model.num_layers=9", "run.seed=4", "train.steps=30")
    assert (said.code, said.launched) == (2, None)
    assert said.err.startswith("4 problems in the config:")
    where = f"as step 40 in {saved}/checkpoints/step_00000040 has it"
    for text in (
        "model.num_layers: another value than in the checkpoint, which then means nothing here",
        "optimizer.lr: another value than in the checkpoint: from here on it would be another run",
        "got:      0.5",
        "from:     command line: optimizer.lr=0.5",
        f"expected: 0, {where}",
        "train.steps: the run is further than this already",
        "checkpoint.allow_drift=true goes on with the new values",
    ):
        assert text in said.err, text


def test_allowed_drift_and_safe_differences_go_on_and_are_told(command: Command, saved: Path) -> None:
    words = (*WORDS, f"run.dir={saved}", "train.steps=200", "cluster.nproc_per_node=4", "sharding.factor=2")
    said = command(*words)
    assert said.code == 0
    assert said.launched is not None
    assert lines(said.launched[0]) == [
        "differs from the checkpoint (safe): train.steps 100 -> 200, sharding.factor null -> 2"
    ]
    assert command(*words, "optimizer.lr=0.5").code == 2
    said = command(*words, "optimizer.lr=0.5", "checkpoint.allow_drift=true")
    assert said.launched is not None
    assert "(checkpoint.allow_drift=true): optimizer.lr" in lines(said.launched[0])[0]
    assert command(*words, "model.hidden_size=32", "checkpoint.allow_drift=true").code == 2


def test_a_damaged_newest_checkpoint_is_not_what_is_compared_with(command: Command, saved: Path) -> None:
    launched = command(*WORDS, "optimizer.lr=0.5").launched
    assert launched is not None
    newer = save(saved, launched[0], 60)
    assert command(*WORDS, f"run.dir={saved}").code == 2
    (newer / COMPLETE).unlink()
    assert command(*WORDS, f"run.dir={saved}").code == 0


def test_starting_over_ignores_it_and_sets_it_aside(command: Command, saved: Path) -> None:
    (saved / "metrics.jsonl").write_text("{}\n")
    said = command(*WORDS, f"run.dir={saved}", "model.num_layers=9", "checkpoint.resume=never")
    assert said.launched is not None
    config = said.launched[0]
    assert lines(config) == []
    (line,) = take_back(config, saved)
    assert "1 checkpoint of an earlier start set aside in" in line
    assert (saved / "earlier" / "0" / "checkpoints" / "step_00000040" / COMPLETE).exists()
    assert (saved / "earlier" / "0" / "metrics.jsonl").exists()
    assert take_back(config, saved) == []


def test_going_back_sets_the_newer_ones_aside(command: Command, saved: Path) -> None:
    launched = command(*WORDS).launched
    assert launched is not None
    save(saved, launched[0], 60)
    (saved / "metrics.jsonl").write_text("{}\n")
    said = command(*WORDS, f"run.dir={saved}", f"checkpoint.resume={saved}/checkpoints/step_00000040")
    assert said.launched is not None
    take_back(said.launched[0], saved)
    assert [path.name for path in (saved / "checkpoints").iterdir()] == ["step_00000040"]
    assert (saved / "metrics.jsonl").exists(), "its lines up to step 40 still hold"


def test_other_actions_on_a_checkpoint_set_nothing_aside(command: Command, saved: Path) -> None:
    launched = command(*WORDS).launched
    assert launched is not None
    save(saved, launched[0], 60)
    config = launched[0]
    config.action, config.run.dir = "eval", str(saved)
    config.checkpoint.resume = str(saved / "checkpoints" / "step_00000040")
    assert (lines(config), take_back(config, saved)) == ([], [])
    assert len(list((saved / "checkpoints").iterdir())) == 2


def test_a_path_without_checkpoints_is_refused(command: Command, tmp_path: Path) -> None:
    said = command(*WORDS, f"checkpoint.resume={tmp_path / 'nowhere'}")
    assert (said.code, said.launched) == (2, None)
    assert "is no folder: expected a run folder, or one of its checkpoints" in said.err


def test_checking_tells_the_same(command: Command, saved: Path) -> None:
    said = command(*WORDS, f"run.dir={saved}", "action=check", "optimizer.lr=0.5")
    assert said.code == 2
    assert "1 problem" in said.err


def test_starting_over_takes_the_metrics_of_a_run_without_checkpoints_along(command: Command, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "earlier" / "0").mkdir(parents=True)
    (run_dir / "wandb_id.txt").write_text("abc")
    launched = command(*WORDS, "checkpoint.resume=never").launched
    assert launched is not None
    (told,) = take_back(launched[0], run_dir)
    assert told.startswith("metrics of an earlier start set aside in ")
    assert (run_dir / "earlier" / "0" / "wandb_id.txt").read_text() == "abc"
    assert take_back(launched[0], run_dir) == []
