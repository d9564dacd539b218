"""The small parts of a run's state: random generators, early stop, limiter, totals, the cut of the batch."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdp_core.runtime.adaptive_limit import AdaptiveLimit, Pressure
from recipes import random_state
from recipes.checkpoint.checkpointer import TrainState
from recipes.loggers.base import Start
from recipes.loss_guard import LossGuard
from recipes.metrics.early_stop import EarlyStop
from recipes.metrics.totals import RunTotals
from recipes.ranks import Ranks
from recipes.resume import Resumed, with_the_same_batch
from recipes.saver import Saver
from recipes.schema.training import CheckpointConfig, EarlyStopConfig, LossSpikeConfig, TrainConfig
from recipes.seeds import seed_training
from tests.recipes.loop.recipes_in_tests import small_recipe

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), *torch.rand(3).tolist()]


def test_generators_go_on_where_they_were() -> None:
    seed_training(small_recipe("gpt").run, rank=1)
    draws()
    saved = random_state.capture(CPU)
    plain = {name: value for name, value in saved.items() if not isinstance(value, torch.Tensor)}
    saved |= json.loads(json.dumps(plain))  # as a checkpoint keeps it
    expected = [draws(), draws()]
    random_state.restore(saved, CPU)
    assert [draws(), draws()] == expected


def test_other_ranks_get_fresh_streams_of_their_own() -> None:
    run, seen = small_recipe("gpt").run, []
    for rank, step in [(0, 10), (1, 10), (0, 20), (0, 10)]:
        random_state.reseed(run, rank, step)
        seen.append(tuple(draws()))
    assert seen[0] == seen[3]
    assert len(set(seen)) == 3


def test_early_stop_goes_on_counting() -> None:
    config = EarlyStopConfig(patience=2)
    first, second = EarlyStop(config), EarlyStop(config)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.observe(1.0) is False
    first.observe(1.0)
    first.observe(1.5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (second.lowest, second.num_bad, second.is_over) == (1.0, 1, False)
    assert second.observe(1.2) is True


def test_the_adaptive_limit_keeps_what_it_learnt() -> None:
    retries, quiet = Pressure(1, 500, 0), Pressure(0, 500, 0)
    first, second, small = AdaptiveLimit(4, 8), AdaptiveLimit(4, 8), AdaptiveLimit(1, 2)
    for pressure in [retries, *[quiet] * 39]:
        first.observe(pressure)
    second.load_state_dict(first.state_dict())
    assert [first.observe(quiet) for _ in range(50)] == [second.observe(quiet) for _ in range(50)]
    small.load_state_dict({**first.state_dict(), "limit": 7})
    assert small.limit == 2


def test_the_judge_of_losses_goes_on_with_its_window() -> None:
    train = TrainConfig(steps=9, global_batch=1, loss_spike=LossSpikeConfig(deviations=4.0, window=8, action="skip"))
    first, second = (LossGuard(train, False, ALONE, lambda text: None) for _ in range(2))
    for step in range(6):
        first.must_skip(step, 2.0 + step % 2, 1.0)
    first.must_skip(6, 99.0, 1.0)
    assert not second.must_skip(7, 99.0, 1.0), "it has seen nothing yet"
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert second.must_skip(7, 99.0, 1.0)


def test_totals_cover_the_steps_before() -> None:
    lines = [{"step": step, "loss": 1.0, "step_s": float(step), "peak_rss_bytes": 10 - step} for step in (1, 2, 3)]
    totals = RunTotals.of([*lines, {"step": 3, "eval_loss": 2.0}])
    again = RunTotals.from_json(json.loads(json.dumps(totals.as_json())))
    assert (again.train_s, again.median_step_s, again.peak_memory) == (6.0, 2.0, {"peak_rss_bytes": 9})
    assert again.last == lines[-1]


@pytest.mark.parametrize(
    ("saved_w", "saved_micro", "set_micro", "world_size", "expected"),
    [
        (4, 3, None, 2, 3),
        (4, 3, None, 3, 2),
        (4, 3, None, 4, None),
        (2, 6, None, 4, None),
        (4, 3, 6, 2, 6),
        (4, 1, None, 1, 1),
    ],
    ids=["half the ranks accumulate", "three ranks", "the same", "more ranks", "said by the user", "one rank"],
)
def test_the_global_batch_is_kept(
    saved_w: int, saved_micro: int, set_micro: int | None, world_size: int, expected: int | None
) -> None:
    config = small_recipe("gpt", train__global_batch=12, train__micro_batch=set_micro)
    resumed = Resumed(Path("x"), TrainState(5, {}, None), saved_w, saved_micro)
    changed, line = with_the_same_batch(config, resumed, world_size)
    assert changed.train.micro_batch == expected
    assert (line is None) == (changed is config)
    if line is not None:
        assert f"global batch 12 kept: {expected} x {world_size} ranks x {12 // world_size // expected}" in line


def test_the_lines_that_hold_behind_a_start() -> None:
    step, evaluation = {"step": 3, "loss": 1.0}, {"step": 3, "eval_loss": 1.0}
    assert Start(3).has_line(step) and Start(3).has_line(evaluation) and not Start(2).has_line(step)
    due = Start(3, is_evaluation_done=False)
    assert due.has_line(step) and not due.has_line(evaluation)
    assert due.has_line({"step": 2, "eval_loss": 1.0})


class UnluckyCheckpointer:
    """Its saves fail when they are waited for, ``checkpoint.on_error=continue``, unless they must succeed."""

    def __init__(self) -> None:
        self.saved_step: int | None = None
        self.last_save_s = None

    def save(self, state: TrainState, *, eval_loss: float | None, must_succeed: bool) -> None:
        if must_succeed:
            self.saved_step = state.step

    def wait(self) -> None:
        pass


def test_the_last_step_is_saved_again_where_its_save_failed(tmp_path: Path) -> None:
    for leave in (lambda saver: saver.finish(5, None), lambda saver: saver.save_and_wait(5)):
        checkpointer = UnluckyCheckpointer()
        config = CheckpointConfig(every="5", on_error="continue")
        saver = Saver(config, checkpointer, ALONE, tmp_path, {})  # type: ignore[arg-type]
        saver.save(5)
        leave(saver)
        assert checkpointer.saved_step == 5


def test_what_the_run_went_on_from_is_not_saved_again(tmp_path: Path) -> None:
    checkpointer = UnluckyCheckpointer()
    saver = Saver(CheckpointConfig(every="5"), checkpointer, ALONE, tmp_path, {}, saved_step=5)  # type: ignore[arg-type]
    saver.finish(5, None)
    assert checkpointer.saved_step is None
