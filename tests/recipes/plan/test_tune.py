"""The search: it finds what an exhaustive look would, stays inside its budget, and never picks what retries."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from recipes.plan.predict import plan
from recipes.plan.result import Plan
from recipes.plan.tune import Search, Tried, knobs_of, overrides_of
from recipes.schema import RecipeConfig
from tests.recipes.plan.configs_in_tests import tiny

PLAN = plan(tiny("gpt"), 4, 4)
KNOBS: dict[str, list[Any]] = {
    "train.activation_checkpointing": [False, True],
    "train.micro_batch": [1, 2, 4],
    "sharding.factor": [1, 4],
}
USABLE = 100


def made_up(config: RecipeConfig) -> Plan:
    """Larger micro-batches and fewer shards are faster and take more memory; recomputation the other way round."""
    again = config.train.activation_checkpointing
    micro, factor = config.train.micro_batch or 1, config.sharding.factor or 1
    needed = 80 // factor + micro * (5 if again else 20)
    speed = micro / (1 + 0.3 * again) / (1 + 0.1 * (factor > 1))
    assert PLAN.rates is not None
    return replace(
        PLAN,
        memory=replace(PLAN.memory, needed=needed, usable=USABLE, fits=needed <= USABLE),
        time=replace(PLAN.time, step_s=1 / speed),
        rates=replace(PLAN.rates, samples_per_s=speed) if needed <= USABLE else None,
    )


def searched(objective: str = "throughput", most: int = 100) -> tuple[Search, Tried, list[Tried]]:
    told: list[Tried] = []
    config = tiny("gpt", train__global_batch=16, train__micro_batch=4, sharding__factor=1)
    search = Search(config, made_up, 4, objective, told.append)
    return search, search.run(KNOBS, most), told


def exhaustive() -> list[Plan]:
    plans = []
    for again, micro, factor in product(*KNOBS.values()):
        changes = {"train__activation_checkpointing": again, "train__micro_batch": micro, "sharding__factor": factor}
        plans.append(made_up(tiny("gpt", train__global_batch=16, **changes)))
    return plans


def test_the_best_is_the_best_of_all() -> None:
    _, best, told = searched()
    fastest = max(one.rates.samples_per_s for one in exhaustive() if one.rates is not None)
    assert best.samples_per_s == pytest.approx(fastest)
    assert best.is_sound
    assert not told[0].is_sound  # where it began


def test_every_plan_is_told_once_and_the_budget_holds() -> None:
    search, _, told = searched(most=5)
    assert len(told) == len(search.tried) == len({one.choice for one in told}) == 5


def test_the_front_trades_speed_for_memory() -> None:
    search, best, _ = searched()
    front = search.front()
    assert front[0].choice == best.choice
    for faster, smaller in pairwise(front):
        assert faster.samples_per_s > smaller.samples_per_s
        assert faster.plan.memory.needed > smaller.plan.memory.needed


def test_overrides_name_what_differs() -> None:
    _, best, _ = searched()
    config = tiny("gpt", train__global_batch=16, train__micro_batch=4, sharding__factor=1)
    words = overrides_of(best, config, 4, "throughput").split()
    assert "sharding.factor=4" in words
    assert not any(word.startswith("train.micro_batch") for word in words)  # 4 it was
    assert "train.global_batch=16" in overrides_of(best, config, 4, "latency").split()


def test_knobs_keep_to_what_divides() -> None:
    knobs = knobs_of(tiny("gpt", train__global_batch=48), 4, 2)
    assert knobs["train.micro_batch"] == [2, 3, 4, 6, 12]  # 12 micro-batches of 1 would take long to record
    assert knobs["sharding.factor"] == [2, 4]
