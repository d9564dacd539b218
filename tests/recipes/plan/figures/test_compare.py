"""Errors, the naive predictor, effects and the table: worked out by hand for a figure of two series."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.plan.figures.compare import NO_SPEED, Comparison, Value, compare
from recipes.plan.figures.points import Figure, Point, figure_of
from recipes.plan.figures.text import text_of

TREE: dict[str, Any] = {
    "title": "two series",
    "x": "GPUs",
    "series": [
        {
            "name": "a",
            "measure": "hardware_tflops",
            "gpus": [8, 16, 32, 64],
            "batch": 1,
            "published": [100.0, 110.0, 120.0, 50.0],
            "read": "printed",
            "calibration": [16],
            "left_out": [64],
        },
        {
            "name": "b",
            "measure": "hardware_tflops",
            "gpus": [8, 16, 32],
            "batch": 2,
            "published": [200.0, 220.0, 210.0],
            "read": "printed",
        },
        {"name": "flag", "measure": "fits", "gpus": [8], "batch": 1, "published": [True], "read": "text"},
        {
            "name": "unknown",
            "measure": "hardware_tflops",
            "at": ["x"],
            "published": [9.0],
            "read": "printed",
            "not_predicted": "the batch is not stated",
        },
    ],
    "effects": [
        {"name": "b over a", "ratio": ["b", "a"]},
        {"name": "8 to 32", "change": {"series": "b", "first": 8, "last": 32}, "kind": "sign"},
    ],
}


@pytest.fixture
def figure() -> Figure:
    return figure_of("0", TREE)


def found(figure: Figure, values: dict[tuple[str, Any], Value | None]) -> Comparison:
    points = {(point.series, point.at): point for point in figure.points}
    predicted: dict[Point, Value | None] = {points[key]: value for key, value in values.items()}
    return compare(figure, predicted)


ALL: dict[tuple[str, Any], Value | None] = {
    ("a", 8): 101.0,
    ("a", 16): 110.0,
    ("a", 32): 117.0,
    ("a", 64): None,
    ("b", 8): 198.0,
    ("b", 16): 231.0,
    ("b", 32): 212.1,
    ("flag", 8): False,
}


def test_errors_and_the_constant_of_a_series(figure: Figure) -> None:
    rows = {(row.point.series, row.point.at): row for row in found(figure, ALL).rows}
    assert rows["a", 8].error == pytest.approx(1.0)
    assert rows["a", 32].error == pytest.approx(-2.5)
    assert rows["a", 8].naive == 110.0  # of its calibration point
    assert rows["b", 8].naive == 210.0  # the median: it has none
    assert rows["a", 8].naive_error == pytest.approx(10.0)
    assert (rows["flag", 8].naive, rows["flag", 8].error, rows["flag", 8].agrees) == (None, None, False)
    assert (rows["a", 64].predicted, rows["a", 64].why_not) == (None, NO_SPEED)
    assert rows["unknown", "x"].why_not == "the batch is not stated"


def test_fitted_points_are_not_counted_with_those_held_out(figure: Figure) -> None:
    fitted, held_out = found(figure, ALL).summaries
    assert (fitted.part, fitted.number, fitted.worst) == ("fitted", 1, 0.0)
    assert (held_out.part, held_out.number) == ("held out", 5)
    assert held_out.median == pytest.approx(1.0)  # 1, 2.5, 1, 5, 1
    assert (held_out.worst, held_out.worst_at) == (pytest.approx(5.0), "b, 16")
    assert held_out.naive_worst == pytest.approx(10.0)


def test_effects_compare_points_of_the_same_run_only(figure: Figure) -> None:
    effects = found(figure, ALL).effects
    assert [(effect.name, effect.at) for effect in effects] == [
        ("b over a", "8"),
        ("b over a", "16"),
        ("b over a", "32"),
        ("8 to 32", ""),
    ]
    assert effects[1].published == pytest.approx(100.0)
    assert effects[1].predicted == pytest.approx(110.0)
    assert effects[1].apart == pytest.approx(10.0)
    assert (effects[3].has_sign, effects[3].published) == (True, pytest.approx(5.0))


def test_an_effect_without_one_of_its_points_is_not_told(figure: Figure) -> None:
    effect = found(figure, {**ALL, ("b", 16): None}).effects[1]
    assert (effect.predicted, effect.apart, effect.has_sign) == (None, None, None)


def test_the_table_says_what_is_fitted_what_is_not_told_and_why(figure: Figure) -> None:
    lines = text_of(found(figure, ALL)).splitlines()
    (fitted,) = [line for line in lines if line.startswith("a") and " 16 " in line]
    assert fitted.split() == ["a", "16", "TFLOPS", "110", "110.0", "+0.0", "%", "+0.0", "%", "fitted"]
    (untold,) = [line for line in lines if line.startswith("a") and " 64 " in line]
    assert untold.endswith(NO_SPEED)
    assert "unknown: not predicted, the batch is not stated" in lines
    (flag,) = [line for line in lines if line.startswith("flag")]
    assert flag.split()[-5:] == ["fits", "yes", "no", "differs", "-"]
    assert any(line.startswith("b over a") and "10.0 points" in line for line in lines)
    assert any(line.startswith("8 to 32") and "same sign" in line for line in lines)
