"""Figures 6a, 6b, 7a, 7b, 7c and 8b whole, against the paper: levels held out from the fit, effects, memory of GPT."""

from __future__ import annotations

import pytest

from launcher.planning.figure import run_configs
from launcher.request import LaunchRequest
from recipes.plan.figures.compare import Comparison, Row, summary_of
from recipes.plan.figures.compute import Run, computed
from recipes.plan.figures.points import load
from recipes.plan.result import Plan

pytestmark = pytest.mark.full  # minutes: some 30 runs are recorded


Plans = dict[tuple[str, ...], Plan]


@pytest.fixture(scope="module")
def gpt_plans() -> Plans:
    """Of the runs that figures 7b and 8b share, by their words; filled by ``figures``."""
    return {}


@pytest.fixture(scope="module")
def figures(gpt_plans: Plans) -> dict[str, Comparison]:
    found = {name: of_paper(name) for name in ("6a", "6b", "7c")}
    return found | {name: of_paper(name, plans=gpt_plans) for name in ("7b", "8b")}


def of_paper(name: str, plans: Plans | None = None) -> Comparison:
    figure = load(name)
    words = (f"experiment=paper/fig{name}",)
    configs = run_configs(figure, LaunchRequest("", words, ("fsdp-launch", *words)))
    runs = {
        words: Run(config, config.cluster.num_nodes * config.cluster.nproc_per_node, config.cluster.nproc_per_node)
        for words, config in configs.items()
    }
    return computed(figure, runs, plans=plans)


def apart(found: Comparison, name: str) -> list[float]:
    return [effect.apart for effect in found.effects if effect.name == name and effect.apart is not None]


def test_19_points_that_no_constant_was_fitted_to(figures: dict[str, Comparison]) -> None:
    rows: list[Row] = [row for name in ("6b", "7b", "7c") for row in figures[name].rows]
    counted = [row for row in rows if row.point.measure == "hardware_tflops" and row.point.is_counted]
    held_out = summary_of("hardware_tflops", "held out", [row for row in counted if not row.point.is_calibration])
    assert held_out.number == 19
    assert held_out.median <= 0.5
    assert held_out.worst <= 1.6
    assert held_out.median < held_out.naive_median
    assert held_out.worst < held_out.naive_worst


def test_what_prefetch_gains(figures: dict[str, Comparison]) -> None:
    found = apart(figures["6b"], "what prefetch gains")
    assert len(found) == 3
    assert max(found) < 2


def test_what_a_second_sample_gains(figures: dict[str, Comparison]) -> None:
    found = apart(figures["7b"], "batch 2 over batch 1")
    assert len(found) == 4
    assert max(found) < 1


def test_what_more_gpus_cost(figures: dict[str, Comparison]) -> None:
    found = [*apart(figures["7c"], "8 to 512 GPUs, batch 8"), *apart(figures["7c"], "8 to 512 GPUs, batch 16")]
    assert len(found) == 2
    assert max(found) < 0.7


def test_two_thirds_of_a_step_are_backward(figures: dict[str, Comparison]) -> None:
    rows = [row for row in figures["7b"].rows if row.point.measure == "backward_share" and not row.point.is_left_out]
    shares = [row.predicted for row in rows if row.predicted is not None]
    assert len(shares) == 9
    assert all(61 <= share <= 73 for share in shares)


def test_hybrid_sharding_of_the_largest_t5_loses(figures: dict[str, Comparison]) -> None:
    found = figures["6a"]
    errors = [row.error for row in found.rows if row.point.measure == "hardware_tflops" and row.error is not None]
    assert len(errors) == 2
    assert max(abs(error) for error in errors) < 2
    (effect,) = [effect for effect in found.effects if effect.name == "hybrid over full"]
    assert effect.predicted is not None
    assert effect.apart is not None
    assert effect.predicted < 0
    assert effect.apart < 1.5


def test_order_of_strategies_at_all_sizes() -> None:
    """Figure 7a: what its levels depend on is not stated, but who is ahead of whom is."""
    effects = of_paper("7a").effects
    assert len(effects) == 15
    assert [effect.has_sign for effect in effects] == [True] * 15


def test_replicas_do_not_fit_above_the_second_size(figures: dict[str, Comparison]) -> None:
    rows = [row for row in figures["6a"].rows if row.point.measure == "fits"]
    assert [row.predicted for row in rows] == [True, True, False]


@pytest.mark.parametrize(("measure", "median", "worst"), [("allocated", 2, 4), ("active", 2, 5), ("reserved", 3, 7)])
def test_memory_of_gpt(figures: dict[str, Comparison], measure: str, median: float, worst: float) -> None:
    rows = [row for row in figures["8b"].rows if row.point.measure == measure]
    found = summary_of(measure, "all", rows)
    assert found.number == 10
    assert found.median <= median
    assert found.worst <= worst


def test_one_run_of_gpt_retries_whatever_of_the_card_is_usable(
    figures: dict[str, Comparison], gpt_plans: Plans
) -> None:
    """128 GPUs with batch 2, as in the paper, for 78 to 81 GB."""
    flags = [row for row in figures["8b"].rows if row.is_flag]
    assert len(flags) == 10
    assert all(row.agrees for row in flags)
    needed = sorted(plan.memory.needed for plan in gpt_plans.values())
    assert needed[-1] > 81e9
    assert needed[-2] < 78e9
