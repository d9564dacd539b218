"""Evaluating and writing with a checkpoint: the run's own numbers, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.checkpoint.errors import CheckpointError
from tests.recipes.portable.made import config_of, save_checkpoint
from tests.recipes.portable.uses import evaluate_again, train_and_save, write_texts
from tests.support.ranks import Pools


@pytest.mark.parametrize("kind", ["gpt", "t5", "dhen"])
def test_an_evaluation_gives_the_runs_own_numbers(kind: str, tmp_path: Path, ranks: Pools) -> None:
    (own, _) = ranks(2).run(train_and_save, kind, str(tmp_path))
    same = ranks(2).run(evaluate_again, kind, str(tmp_path), None)[0]
    assert same.metrics == own, "the same ranks, batches and order: the same bits"
    assert (same.step, same.num_samples) == (3, 10)
    written = json.loads((tmp_path / "evaluation.json").read_text())
    assert written["metrics"] == own
    for others in (
        ranks(4).run(evaluate_again, kind, str(tmp_path), 2)[0],
        evaluate_again(None, kind, str(tmp_path), 1),
    ):
        assert others.metrics == pytest.approx(own, rel=1e-5)


def test_another_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    train_and_save(None, "gpt", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"a checkpoint of another model\n  this model needs"):
        evaluate_again(None, "t5", str(tmp_path), 1)


def test_text_is_the_same_on_any_number_of_ranks(tmp_path: Path, ranks: Pools) -> None:
    checkpoints = {
        preset: save_checkpoint(None, config_of(preset), str(tmp_path / preset)) for preset in ("gpt_tiny", "t5_tiny")
    }
    alone = write_texts(None, checkpoints, str(tmp_path))
    assert len(set(alone)) == 4, "two models, greedy and drawn"
    for texts in ranks(2).run(write_texts, checkpoints, str(tmp_path)):
        assert texts == alone
    assert json.loads((tmp_path / "generation.json").read_text())["seed"] == 5
