"""Starts in one process: damaged checkpoints, finished and early-stopped runs, other data, a run begun from another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.checkpoint.errors import CheckpointError
from recipes.checkpoint.folder import COMPLETE
from recipes.data.errors import DataError
from recipes.schema import RecipeConfig
from recipes.schema.training import EarlyStopConfig
from tests.recipes.loop.recipes_in_tests import small_recipe
from tests.recipes.resume.interrupted import computed_lines, losses, read_steps, run_until, saved_state

STEPS = 6


def config(**changes: Any) -> RecipeConfig:
    settings = {"train__steps": STEPS, "checkpoint__every": "2", "checkpoint__keep_last": 3, "train__eval_samples": 4}
    return small_recipe("gpt", **settings | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("whole"))
    run_until(None, config(), folder)
    return folder


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("how", ["a flipped byte", "no marker", "no file"])
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(
    tmp_path: Path, whole: str, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    assert run_until(None, config(), str(tmp_path), stop_at=5) == 5
    (tensors,) = checkpoint(tmp_path, 5).glob("*.safetensors")
    if how == "a flipped byte":
        flip(tensors)
    elif how == "no file":
        tensors.unlink()
    else:
        (checkpoint(tmp_path, 5) / COMPLETE).unlink()
    capsys.readouterr()
    assert run_until(None, config(), str(tmp_path)) == STEPS
    out = capsys.readouterr().out
    assert "checkpoint passed over: " in out
    assert str(checkpoint(tmp_path, 5)) in out
    assert f"resumed from step 4 of {checkpoint(tmp_path, 4)}" in out
    assert computed_lines(str(tmp_path)) == computed_lines(whole)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(tmp_path: Path) -> None:
    run_until(None, config(), str(tmp_path), stop_at=3)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for step in (2, 3):
        flip(next(checkpoint(tmp_path, step).glob("*.safetensors")))
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints can be used"):
        run_until(None, config(), str(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_is_found_finished(whole: str) -> None:
    run_dir = Path(whole)
    before = computed_lines(whole), saved_state(whole), (run_dir / "summary.json").read_text()
    assert run_until(None, config(), whole) == STEPS
    assert (computed_lines(whole), saved_state(whole)) == before[:2]
    summary = (run_dir / "summary.json").read_text()
    assert summary.splitlines()[:6] == before[2].splitlines()[:6], "status, steps, samples, ranks, F, parameters"


def test_early_stopping_counts_on_and_stays_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patient = config(train__eval_every=1, train__early_stop=EarlyStopConfig(patience=3, min_delta=100.0))
    assert run_until(None, patient, str(tmp_path), stop_at=3) == 3
    assert run_until(None, patient, str(tmp_path)) == 4
    assert run_until(None, patient, str(tmp_path)) == 4
    assert capsys.readouterr().out.count("stopping early after step 4") == 2
    patient.train.early_stop.patience = 5
    assert run_until(None, patient, str(tmp_path)) == STEPS


def test_a_run_begun_from_another_goes_on_by_itself(tmp_path: Path, whole: str) -> None:
    other, mine = tmp_path / "other", str(tmp_path / "mine")
    Path(mine).mkdir()
    run_until(None, config(), str(other), stop_at=3)
    begun = config(checkpoint__resume=str(other))
    assert run_until(None, begun, mine, stop_at=5) == 5
    assert [line["step"] for line in read_steps(mine)] == [4, 5]
    assert run_until(None, begun, mine) == STEPS
    assert losses(mine) == losses(whole)[3:]
    assert losses(str(other)) == losses(whole)[:3]


def test_other_data_are_refused_or_taken_from_their_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_until(None, config(), str(tmp_path), stop_at=3)
    others: dict[str, Any] = {"data__num_samples": 80}
    with pytest.raises(DataError, match="dataset_len was 96, is now 80.*checkpoint.allow_drift=true"):
        run_until(None, config(**others), str(tmp_path))
    assert run_until(None, config(checkpoint__allow_drift=True, **others), str(tmp_path)) == STEPS
    assert "the data are taken from their beginning" in capsys.readouterr().out
    assert [line["step"] for line in read_steps(str(tmp_path))] == list(range(1, STEPS + 1))


def test_another_global_batch_goes_on_at_its_sample(tmp_path: Path) -> None:
    run_until(None, config(), str(tmp_path), stop_at=3)
    run_until(None, config(train__global_batch=4, checkpoint__allow_drift=True), str(tmp_path))
    assert [line["samples"] for line in read_steps(str(tmp_path))] == [8, 16, 24, 28, 32, 36]
