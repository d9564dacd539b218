"""What the paper published, point by point, and the words that make a config of each. No torch.

A figure is a file of ``published/``. Its series may say:

==============  ========================================================================================================
measure         a name of ``measures.MEASURES``
gpus, batch     ranks (eight to a host) and samples per rank: a list, or one number for all points
at              what the points are called where that is not the number of GPUs
words           overrides of the figure's preset; ``words_at``: more of them, by point
published       values, in the order of the points; ``read``: how they were read off the paper
calibration     points that constants were fitted to; the others are held out
left_out        points that no statistics count; ``is_counted: false``: none of the series
not_predicted   why nothing is computed
total_numel, calls, is_list_at   of ``all_gather_ms``: float32 elements in all, calls, points that gather into a list
==============  ========================================================================================================
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

RANKS_PER_HOST = 8
Name = str | int


@dataclass(frozen=True)
class Gathers:
    """Of one point of ``all_gather_ms``: so many calls gather so many float32 elements in all."""

    total_numel: int
    num_calls: int
    is_list: bool


@dataclass(frozen=True)
class Point:
    """One published value. words: empty where nothing is planned."""

    series: str
    measure: str
    at: Name
    published: float | bool
    words: tuple[str, ...]
    gathers: Gathers | None
    is_calibration: bool
    is_left_out: bool
    is_counted: bool
    not_predicted: str


@dataclass(frozen=True)
class Effect:
    """What two points say together. how: ``ratio`` (percent), ``difference`` or ``change`` (percent) between the series
    ``above`` and ``below``; of a change they are one series, at ``first`` and ``last``. is_sign: only its sign counts.
    """

    name: str
    how: str
    above: str
    below: str
    first: Name | None = None
    last: Name | None = None
    is_sign: bool = False


@dataclass(frozen=True)
class Figure:
    """x: what ``Point.at`` counts. read: by series, how the values were read."""

    name: str
    title: str
    x: str
    points: tuple[Point, ...]
    effects: tuple[Effect, ...]
    read: dict[str, str]

    @property
    def series(self) -> list[str]:
        return list(dict.fromkeys(point.series for point in self.points))

    @property
    def measures(self) -> list[str]:
        return list(dict.fromkeys(point.measure for point in self.points))


def load(name: str) -> Figure:
    """name: as in ``7b``."""
    file = importlib.resources.files("recipes.plan.figures").joinpath("published", f"{name}.yaml")
    return figure_of(name, yaml.safe_load(file.read_text(encoding="utf-8")))


def figure_of(name: str, tree: dict[str, Any]) -> Figure:
    """From the file's tree."""
    return Figure(
        name=name,
        title=tree["title"],
        x=tree["x"],
        points=tuple(point for series in tree["series"] for point in _points(series)),
        effects=tuple(_effect(effect) for effect in tree.get("effects", ())),
        read={series["name"]: series["read"] for series in tree["series"]},
    )


def _points(series: dict[str, Any]) -> Iterator[Point]:
    published = series["published"]
    number = len(published)
    gpus, batch, calls = (_each(series.get(key), number) for key in ("gpus", "batch", "calls"))
    names = series.get("at") or gpus
    calibration, left_out = series.get("calibration", []), series.get("left_out", [])
    is_planned = "not_predicted" not in series and gpus[0] is not None
    for index, at in enumerate(names):
        words = [*series.get("words", ()), *series.get("words_at", {}).get(at, ())]
        gathers = None
        if "total_numel" in series:
            gathers = Gathers(series["total_numel"], calls[index] or 1, at in series.get("is_list_at", ()))
        yield Point(
            series=series["name"],
            measure=series["measure"],
            at=at,
            published=published[index],
            words=(*_size(gpus[index], batch[index]), *words) if is_planned else (),
            gathers=gathers,
            is_calibration=at in calibration,
            is_left_out=at in left_out,
            is_counted=series.get("is_counted", True) and at not in left_out,
            not_predicted=series.get("not_predicted", ""),
        )


def _size(gpus: int, batch: int) -> tuple[str, ...]:
    """Words for the number of ranks and the batch of each."""
    return (
        f"cluster.num_nodes={gpus // RANKS_PER_HOST}",
        f"cluster.nproc_per_node={RANKS_PER_HOST}",
        f"train.micro_batch={batch}",
        f"train.global_batch={batch * gpus}",
    )


def _each(value: Any, number: int) -> list[Any]:
    return list(value) if isinstance(value, list) else [value] * number


def _effect(tree: dict[str, Any]) -> Effect:
    is_sign = tree.get("kind") == "sign"
    if "change" in tree:
        change = tree["change"]
        return Effect(
            tree["name"], "change", change["series"], change["series"], change["first"], change["last"], is_sign
        )
    how = "ratio" if "ratio" in tree else "difference"
    above, below = tree[how]
    return Effect(tree["name"], how, above, below, is_sign=is_sign)
