"""The learning rate is a pure function of the step."""

from __future__ import annotations

import itertools
import math

import pytest

from recipes.schedulers import schedule
from recipes.schema.training import SchedulerConfig

STEPS, PEAK = 100, 0.5


def rates(**fields: object) -> list[float]:
    lr = schedule(SchedulerConfig(**fields), PEAK, STEPS)
    return [lr(step) for step in range(STEPS)]


def test_warmup_is_linear_reaches_the_peak_and_wastes_no_step():
    values = rates(kind="constant", warmup_steps=10)
    assert values[:10] == pytest.approx([PEAK * k / 10 for k in range(1, 11)])
    assert values[10:] == [PEAK] * 90


@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_the_shape_starts_at_the_peak_falls_and_ends_at_the_floor(kind: str, warmup: int):
    values = rates(kind=kind, warmup_steps=warmup, min_lr_ratio=0.1)
    after = values[max(0, warmup - 1) :]
    assert after[0] == pytest.approx(PEAK)
    assert all(later < earlier for earlier, later in itertools.pairwise(after))
    assert values[-1] == pytest.approx(0.1 * PEAK)


def test_cosine_is_halfway_in_the_middle():
    lr = schedule(SchedulerConfig(kind="cosine", min_lr_ratio=0.0), PEAK, 101)
    assert lr(50) == pytest.approx(PEAK / 2)
    assert lr(25) == pytest.approx(PEAK * (1 + math.cos(math.pi / 4)) / 2)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_short_runs_and_long_warmups_have_a_rate_everywhere(kind: str):
    assert schedule(SchedulerConfig(kind=kind), PEAK, 1)(0) == PEAK
    lr = schedule(SchedulerConfig(kind=kind, warmup_steps=10), PEAK, 4)
    assert [lr(step) for step in range(4)] == pytest.approx([PEAK * k / 10 for k in range(1, 5)])


def test_no_warmup_steps_means_a_twentieth_of_the_run() -> None:
    assert rates(kind="cosine", warmup_steps=None) == rates(kind="cosine", warmup_steps=STEPS // 20)
    assert rates(kind="cosine", warmup_steps=None) != rates(kind="cosine", warmup_steps=0)
