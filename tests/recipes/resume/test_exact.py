"""Stopped twice and gone on, bit by bit what an uninterrupted run gives; at other W, F, RAF, units the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.schema import RecipeConfig
from tests.recipes.loop.recipes_in_tests import small_recipe
from tests.recipes.resume.interrupted import (
    computed_lines,
    in_order,
    losses,
    many_until,
    samples_until,
    saved_state,
    saved_tensors,
)
from tests.support.ranks import Pools

STEPS, STOPS = 10, (3, 8)
SAVED = {"checkpoint__every": "1000", "train__steps": STEPS, "data__num_samples": 30}  # three epochs
# Every step is one epoch of the same eight samples; in the third one of them holds a NaN, and there the run is stopped.
POISONED = {**SAVED, "data__num_samples": 8, "data__is_new_each_epoch": False, "data__poisoned_epoch": 2}
FP16 = {
    "precision__param_dtype": "float16",
    "precision__reduce_dtype": "float16",
    "precision__grad_scaler": True,
    "precision__initial_scale": 2.0**20,  # too high: it is still falling when the run stops
    "precision__scale_growth_interval": 3,
}
RUNS: dict[str, RecipeConfig] = {
    "gpt with dropout": small_recipe(
        "gpt", model__dropout=0.2, train__micro_batch=2, train__eval_every=3, train__eval_samples=8, **SAVED
    ),
    "gpt in float16": small_recipe("gpt", rate_limiter__kind="adaptive", **FP16, **SAVED),
    "t5": small_recipe("t5", train__eval_every=4, train__eval_samples=4, **SAVED),
    "dhen": small_recipe("dhen", **SAVED),
    "dhen with a step left out": small_recipe("dhen", train__micro_batch=2, train__on_bad_loss="skip", **POISONED),
}


@pytest.fixture(scope="module")
def exact_runs(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, list[int]]]:
    """For each run: the folder of the uninterrupted one, of the interrupted one, and the steps done at each stop."""
    folders = {name: (tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("stopped")) for name in RUNS}
    starts: list[tuple[RecipeConfig, str, int | None]] = []
    for name, config in RUNS.items():
        whole, stopped = map(str, folders[name])
        starts += [(config, whole, None), *((config, stopped, stop) for stop in (*STOPS, None))]
    done = ranks(2).run(many_until, starts, timeout_s=240.0)
    assert done[0] == done[1]
    each = len(STOPS) + 2
    return {
        name: (*map(str, folders[name]), done[0][number * each + 1 : (number + 1) * each])
        for number, name in enumerate(RUNS)
    }


@pytest.mark.parametrize("name", RUNS)
def test_stopped_twice_gives_the_same_bits(exact_runs: dict[str, tuple[str, str, list[int]]], name: str) -> None:
    whole, stopped, done = exact_runs[name]
    assert done == [*STOPS, STEPS]
    assert computed_lines(stopped) == computed_lines(whole)
    assert saved_state(stopped) == saved_state(whole)
    expected, got = saved_tensors(whole), saved_tensors(stopped)
    assert got.keys() == expected.keys()
    different = [tensor for tensor in expected if not torch.equal(got[tensor], expected[tensor])]
    assert not different


def test_the_comparison_is_not_empty(exact_runs: dict[str, tuple[str, str, list[int]]]) -> None:
    scales = [line["loss_scale"] for line in computed_lines(exact_runs["gpt in float16"][0])]
    assert len(set(scales)) > 2
    left_out = [
        line["step"] for line in computed_lines(exact_runs["dhen with a step left out"][0]) if line.get("skipped")
    ]
    assert left_out == [3]
    names = saved_tensors(exact_runs["dhen"][0])
    assert any(name.startswith("optimizer/1/") for name in names), "the tables' own optimizer is there"
    assert any(name.startswith("rank/1/") for name in names), "the generators of rank 1 are there"
    evaluations = [line["step"] for line in computed_lines(exact_runs["t5"][1]) if "eval_loss" in line]
    assert evaluations == [4, 8, 10], "the one that was due when the run was stopped at 8 was made up for"


# W, F, RAF, units, micro-batch, and in which step it is stopped.
WORLDS: list[tuple[int, dict[str, Any], int | None]] = [
    (4, {"sharding__factor": 4}, 2),
    (2, {"sharding__factor": 1, "sharding__reshard_after_forward": False}, 5),
    (3, {"sharding__factor": 3, "sharding__units": "root"}, 7),
    (4, {"sharding__factor": 2, "sharding__units": "size", "sharding__min_unit_numel": 2000}, None),
]


@pytest.mark.parametrize("kind", ["gpt", pytest.param("t5", marks=pytest.mark.full), "dhen"])
def test_other_worlds_go_on_with_the_same_samples_and_losses(ranks: Pools, tmp_path: Path, kind: str) -> None:
    def config(settings: dict[str, Any]) -> RecipeConfig:
        dropout = {} if kind == "dhen" else {"model__dropout": 0.0}
        return small_recipe(kind, train__global_batch=12, **dropout, **settings, **SAVED)

    whole, moving = str(tmp_path / "whole"), str(tmp_path / "moving")
    expected = in_order(ranks(4).run(samples_until, config({}), whole))
    seen: list[list[str]] = []
    for world_size, settings, stop_at in WORLDS:
        seen += in_order(ranks(world_size).run(samples_until, config(settings), moving, stop_at))
    assert len(expected) == STEPS
    assert seen == expected
    assert losses(moving) == pytest.approx(losses(whole), rel=1e-5)
