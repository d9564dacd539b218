"""Figure 8c whole, against the paper: memory of T5-11B with its library's attention of 2022."""

from __future__ import annotations

import pytest

from launcher.planning.figure import run_configs
from launcher.request import LaunchRequest
from recipes.plan.figures.compare import Comparison, summary_of
from recipes.plan.figures.compute import Run, computed
from recipes.plan.figures.points import RANKS_PER_HOST, load

pytestmark = pytest.mark.full  # minutes: 14 runs are recorded


@pytest.fixture(scope="module")
def figure() -> Comparison:
    published, words = load("8c"), ("experiment=paper/fig8c",)
    configs = run_configs(published, LaunchRequest("", words, ("fsdp-launch", *words)))
    runs = {
        words: Run(config, config.cluster.num_nodes * RANKS_PER_HOST, RANKS_PER_HOST)
        for words, config in configs.items()
    }
    return computed(published, runs)


@pytest.mark.parametrize(
    ("measure", "median", "worst"), [("allocated", 7.5, 16), ("active", 7, 15), ("reserved", 12, 20)]
)
def test_memory_of_t5(figure: Comparison, measure: str, median: float, worst: float) -> None:
    found = summary_of(measure, "all", [row for row in figure.rows if row.point.measure == measure])
    assert found.number == 14
    assert found.median <= median
    assert found.worst <= worst
