"""What is shipped of the paper's figures: every file can be read, agrees with itself and asks for known things."""

from __future__ import annotations

import pytest

from launcher.schema import FIGURES
from recipes.plan.figures.measures import MEASURES
from recipes.plan.figures.points import Point, figure_of, load


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_agrees_with_itself(name: str) -> None:
    figure = load(name)
    assert figure.points
    assert set(figure.measures) <= set(MEASURES)
    assert set(figure.read) == set(figure.series)
    keys = [(point.series, point.at) for point in figure.points]
    assert len(set(keys)) == len(keys)
    for point in figure.points:
        assert isinstance(point.published, bool) == MEASURES[point.measure].is_flag
        is_of_a_plan = MEASURES[point.measure].of is not None
        assert bool(point.words) == (is_of_a_plan and not point.not_predicted)
    for effect in figure.effects:
        assert {effect.above, effect.below} <= set(figure.series)
        if effect.how == "change":
            assert {(effect.above, effect.first), (effect.above, effect.last)} <= set(keys)


def throughput() -> list[Point]:
    points = [point for name in ("6b", "7b", "7c") for point in load(name).points]
    return [point for point in points if point.measure == "hardware_tflops" and point.is_counted]


def test_constants_are_fitted_to_seven_of_26_points() -> None:
    points = throughput()
    assert len(points) == 26
    fitted = [(point.series, point.at) for point in points if point.is_calibration]
    assert fitted == [
        ("without prefetch", 256),
        ("batch 1", 192),
        ("batch 1", 512),
        ("batch 2", 256),
        ("batch 8", 8),
        ("batch 8", 512),
        ("batch 16", 64),
    ]


def test_points_become_words() -> None:
    tree = {
        "title": "t",
        "x": "GPUs",
        "series": [
            {
                "name": "a",
                "measure": "hardware_tflops",
                "gpus": [16, 64],
                "batch": 2,
                "words": ["sharding=hybrid"],
                "words_at": {64: ["model=t5_2b"]},
                "published": [1.5, 2.5],
                "read": "printed",
                "left_out": [64],
            }
        ],
    }
    first, second = figure_of("0", tree).points
    sizes = ("cluster.nproc_per_node=8", "train.micro_batch=2")
    assert first.words == ("cluster.num_nodes=2", *sizes, "train.global_batch=32", "sharding=hybrid")
    assert second.words == ("cluster.num_nodes=8", *sizes, "train.global_batch=128", "sharding=hybrid", "model=t5_2b")
    assert (first.is_counted, second.is_counted, second.is_left_out) == (True, False, True)
