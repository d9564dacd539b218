"""From points with configs to predicted values: every run is planned once, however many points show it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recipes.plan.figures.collectives import all_gathers_ms
from recipes.plan.figures.compare import Comparison, compare
from recipes.plan.figures.measures import MEASURES, Value
from recipes.plan.figures.page import page_of
from recipes.plan.figures.points import Figure, Point
from recipes.plan.figures.text import text_of
from recipes.plan.machine import machine_of
from recipes.plan.predict import plan
from recipes.plan.result import Plan
from recipes.schema import RecipeConfig
from recipes.sizes import UnknownSize

USERS_ERRORS = (UnknownSize,)
Words = tuple[str, ...]
Report = Callable[[Point, Value | None], None]


@dataclasses.dataclass(frozen=True)
class Run:
    """A checked config, on so many ranks with so many to a host."""

    config: RecipeConfig
    world_size: int
    ranks_per_host: int


def computed(
    figure: Figure,
    runs: Mapping[Words, Run],
    report: Report = lambda point, value: None,
    plans: dict[Words, Plan] | None = None,
) -> Comparison:
    """runs: by the words of points; points of collectives have none, and use that of ``()``.

    report: told of every point as soon as it is known.
    plans: of these runs, as far as they are there; the others are added.

    Raises:
        UnknownSize: only the data can tell a size that a model needs. ValueError: the profile knows too little.
    """
    predicted: dict[Point, Value | None] = {}
    plans = {} if plans is None else plans
    for point in figure.points:
        if point.not_predicted:
            continue
        predicted[point] = _value(point, runs[point.words], plans)
        report(point, predicted[point])
    return compare(figure, predicted)


def _value(point: Point, run: Run, plans: dict[Words, Plan]) -> Value | None:
    of = MEASURES[point.measure].of
    if of is None:
        assert point.gathers is not None
        machine = machine_of(run.config.hardware, run.ranks_per_host)
        return all_gathers_ms(point.gathers, run.world_size, machine.hardware)
    if point.words not in plans:
        plans[point.words] = plan(run.config, run.world_size, run.ranks_per_host)
    return of(plans[point.words])


def write(found: Comparison, folder: Path, command: str) -> None:
    """figure.json and figure.html; the folder exists."""
    (folder / "figure.json").write_text(json.dumps(as_json(found), indent=2) + "\n", encoding="utf-8")
    (folder / "figure.html").write_text(page_of(found, command), encoding="utf-8")


def as_json(found: Comparison) -> dict[str, Any]:
    """Plain data."""
    rows = [
        {
            "series": row.point.series,
            "at": row.point.at,
            "measure": row.point.measure,
            "unit": MEASURES[row.point.measure].unit,
            "published": row.point.published,
            "read": found.figure.read[row.point.series],
            "predicted": row.predicted,
            "why_not": row.why_not,
            "error_percent": row.error,
            "naive": row.naive,
            "naive_error_percent": row.naive_error,
            "is_calibration": row.point.is_calibration,
            "is_counted": row.point.is_counted,
            "words": list(row.point.words),
        }
        for row in found.rows
    ]
    return {
        "figure": found.figure.name,
        "title": found.figure.title,
        "points": rows,
        "summaries": [dataclasses.asdict(summary) for summary in found.summaries],
        "effects": [dataclasses.asdict(effect) | {"apart": effect.apart} for effect in found.effects],
    }


__all__ = ["USERS_ERRORS", "Run", "as_json", "computed", "text_of", "write"]
