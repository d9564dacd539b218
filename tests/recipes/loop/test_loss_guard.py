"""Losses that are not finite or far off: what is judged bad, and that each policy does what it says, on all ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from recipes.loss_guard import LossError, LossGuard, SpikeDetector
from recipes.ranks import Ranks
from recipes.schema import RecipeConfig
from recipes.schema.training import LossSpikeConfig, SchedulerConfig, TrainConfig
from tests.recipes.loop.recipes_in_tests import lines_of, many_lines, small_recipe
from tests.support.ranks import Rank

if TYPE_CHECKING:
    from tests.support.ranks import Pools

ALONE = Ranks(0, 1, torch.device("cpu"))
CALM = [2.0 + 0.1 * (-1) ** step for step in range(16)]  # median 2.1 or so, deviation 0.1


def guard(said: list[str], has_scaler: bool = False, spike: dict[str, Any] | None = None, **train: Any) -> LossGuard:
    config = TrainConfig(steps=100, global_batch=8, loss_spike=LossSpikeConfig(**(spike or {})), **train)
    return LossGuard(config, has_scaler, ALONE, said.append)


def line(step: int, loss: float, grad_norm: float = 1.0) -> dict[str, float | int | None]:
    return {"step": step, "loss": loss, "grad_norm": grad_norm}


@pytest.mark.parametrize(
    ("loss", "grad_norm", "says"),
    [
        (math.nan, math.nan, "the loss of step 7 is nan"),
        (math.inf, 1.0, "the loss of step 7 is inf"),
        (2.0, math.inf, "the gradient of step 7 is not finite (its loss is 2)"),
    ],
)
def test_stop_names_the_step_and_what_to_try(loss: float, grad_norm: float, says: str) -> None:
    judge = guard([])
    assert judge.veto(7) is None  # nothing waits for the device
    judge.see([line(6, 2.0)])
    with pytest.raises(LossError) as raised:
        judge.see([line(7, loss, grad_norm), line(8, math.nan)])
    assert says in str(raised.value)
    assert "try a lower optimizer.lr" in str(raised.value)


def test_warn_is_said_once_for_a_row() -> None:
    said: list[str] = []
    judge = guard(said, on_bad_loss="warn")
    judge.see([line(step, math.nan, math.nan) for step in (1, 2, 3)])
    judge.see([line(4, 2.0), line(5, math.nan, math.nan)])
    assert [text.split(";")[0] for text in said] == ["the loss of step 1 is nan", "the loss of step 5 is nan"]


def test_what_is_no_bad_loss() -> None:
    guard([]).see([line(1, math.nan, 0.0)])  # a step that counted no target: a mean over nothing
    guard([], has_scaler=True).see([line(1, 2.0, math.inf)])  # an overflow: the scaler leaves the update out
    guard([]).see([line(step, loss) for step, loss in enumerate([*CALM, 1e9])])  # nobody asked for spikes


def test_a_spike_is_measured_from_the_median_in_deviations() -> None:
    detector = SpikeDetector(LossSpikeConfig(deviations=6.0, window=32, action="skip"))
    assert [detector.is_spike(loss) for loss in CALM[:8]] == [False] * 8
    limit = detector.limit()
    assert limit == pytest.approx(2.0 + 6 * 1.4826 * 0.1)
    assert limit is not None
    assert detector.is_spike(limit + 0.01)
    assert detector.limit() == limit  # what is skipped teaches nothing
    assert not detector.is_spike(limit - 0.01)
    assert not detector.is_spike(0.1)  # far below is no harm


def test_a_loss_that_hardly_moves_makes_no_spike_of_a_wiggle() -> None:
    detector = SpikeDetector(LossSpikeConfig(deviations=6.0, window=8))
    for _ in range(8):
        detector.is_spike(2.0)
    assert detector.limit() == pytest.approx(2.0 + 6 * 0.01 * 2.0)


def test_a_spike_stops_when_it_lasts() -> None:
    said: list[str] = []
    judge = guard(said, spike={"deviations": 6.0, "window": 32, "steps": 3, "action": "stop"})
    judge.see([line(step, loss) for step, loss in enumerate(CALM, start=1)])
    judge.see([line(17, 9.0), line(18, 2.0), line(19, 8.0), line(20, 9.0)])
    assert len(said) == 2  # two rows, each told once
    with pytest.raises(LossError, match=r"the loss of step 21 is 10, above 2\.\d+, .* for 3 steps now"):
        judge.see([line(21, 10.0)])


def test_skipping_has_an_end() -> None:
    said: list[str] = []
    judge = guard(said, on_bad_loss="skip", max_skipped=3)
    assert judge.veto(1) is not None
    assert [judge.must_skip(step, math.nan, math.nan) for step in (1, 2)] == [True, True]
    assert not judge.must_skip(3, 2.0, 1.0)
    assert [judge.must_skip(step, math.nan, math.nan) for step in (4, 5, 6)] == [True] * 3
    assert len(said) == 5
    assert judge.must_stop
    with pytest.raises(LossError, match=r"3 updates in a row were left out \(train.max_skipped\), the last at step 6"):
        judge.see([])


def poisoned(**changes: Any) -> RecipeConfig:
    """Every step is one epoch of the same eight samples; in the third one of them holds a NaN."""
    same = {"data__num_samples": 8, "data__is_new_each_epoch": False, "data__poisoned_epoch": 2}
    config = small_recipe("dhen", train__steps=6, **{**same, **changes})
    config.scheduler = SchedulerConfig(kind="constant", warmup_steps=0)
    return config


def test_a_skipped_update_leaves_no_trace(ranks: Pools) -> None:
    """On two ranks, one of which has the NaN: tables, moments and all go on as if the step had not been."""
    clean, skipped = ranks(2).run(
        many_lines, [poisoned(data__poisoned_epoch=None), poisoned(train__on_bad_loss="skip")]
    )[0]
    assert [row["skipped"] for row in skipped] == [0, 0, 1, 0, 0, 0]
    losses = [float(row["loss"] or 0.0) for row in skipped]
    assert math.isnan(losses[2])
    assert losses[:2] + losses[3:] == pytest.approx([float(row["loss"] or 0.0) for row in clean][:5], rel=1e-5)


def stopped(rank: Rank, config: RecipeConfig) -> str:
    try:
        lines_of(rank, config)
    except LossError as error:
        return str(error)
    return "went on"


def test_every_rank_stops_at_the_same_step(ranks: Pools) -> None:
    told = ranks(2).run(stopped, poisoned(train__log_every=2))
    assert told[0] == told[1]
    assert told[0].startswith("the loss of step 3 is nan")
