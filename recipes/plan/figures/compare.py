"""Predicted beside published: errors, what a naive predictor would have reached, and the effects. Pure, no torch.

The naive predictor is one constant a series: the mean of its calibration points, or, where there are none, the median
of all its points (it has seen the answers then). A planner that does not beat it has only repeated a level.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from recipes.plan.figures.points import Effect, Figure, Name, Point

Value = float | bool
NO_SPEED = "no speed is told: the allocator retries"


@dataclass(frozen=True)
class Row:
    """One point. predicted: None, with the reason in ``why_not``, where nothing is told. naive: None for flags."""

    point: Point
    predicted: Value | None
    why_not: str
    naive: float | None

    @property
    def is_flag(self) -> bool:
        return isinstance(self.point.published, bool)

    @property
    def agrees(self) -> bool | None:
        """Of a flag."""
        return None if self.predicted is None or not self.is_flag else self.predicted == self.point.published

    @property
    def error(self) -> float | None:
        """Percent of what is published; above 0: too much is predicted."""
        return None if self.predicted is None else self._percent(self.predicted)

    @property
    def naive_error(self) -> float | None:
        return None if self.naive is None else self._percent(self.naive)

    def _percent(self, value: Value) -> float | None:
        return None if self.is_flag else 100 * (value / self.point.published - 1)


@dataclass(frozen=True)
class Summary:
    """Errors in percent over some rows of one measure, without their signs; ``worst_at``: series and point."""

    measure: str
    part: str
    number: int
    median: float
    worst: float
    worst_at: str
    naive_median: float
    naive_worst: float


@dataclass(frozen=True)
class EffectRow:
    """At one point of the x axis. apart: in the effect's own unit (percentage points, or GB)."""

    name: str
    at: str
    unit: str
    published: float
    predicted: float | None
    is_sign: bool

    @property
    def apart(self) -> float | None:
        return None if self.predicted is None else abs(self.predicted - self.published)

    @property
    def has_sign(self) -> bool | None:
        """Whether the predicted effect goes the same way."""
        return None if self.predicted is None else (self.predicted > 0) == (self.published > 0)


@dataclass(frozen=True)
class Comparison:
    """A whole figure. ``rows`` in the order of its points."""

    figure: Figure
    rows: tuple[Row, ...]
    summaries: tuple[Summary, ...]
    effects: tuple[EffectRow, ...]


def compare(figure: Figure, predicted: Mapping[Point, Value | None]) -> Comparison:
    """predicted: None for a plan that tells no such number; points that are not in it were not computed."""
    naive = naive_constants(figure.points)
    rows = tuple(
        Row(point, predicted.get(point), _why_not(point, predicted), naive.get(point.series)) for point in figure.points
    )
    summaries = tuple(summary for measure in figure.measures for summary in _summaries(measure, rows))
    effects = tuple(row for effect in figure.effects for row in _effect_rows(effect, rows))
    return Comparison(figure, rows, summaries, effects)


def naive_constants(points: Sequence[Point]) -> dict[str, float]:
    """By series; none for flags."""
    known: dict[str, list[float]] = {}
    chosen: dict[str, list[float]] = {}
    for point in points:
        if isinstance(point.published, bool):
            continue
        known.setdefault(point.series, []).append(point.published)
        if point.is_calibration:
            chosen.setdefault(point.series, []).append(point.published)
    return {series: mean(chosen[series]) if series in chosen else median(known[series]) for series in known}


def _why_not(point: Point, predicted: Mapping[Point, Value | None]) -> str:
    if point.not_predicted:
        return point.not_predicted
    if point not in predicted:
        return "not computed"
    return "" if predicted[point] is not None else NO_SPEED


def _summaries(measure: str, rows: Sequence[Row]) -> Iterator[Summary]:
    counted = [row for row in rows if row.point.measure == measure and row.point.is_counted and row.error is not None]
    fitted = [row for row in counted if row.point.is_calibration]
    held_out = [row for row in counted if not row.point.is_calibration]
    for part, some in (("fitted", fitted), ("held out", held_out)):
        if some:
            yield summary_of(measure, part if fitted else "all", some)


def summary_of(measure: str, part: str, rows: Sequence[Row]) -> Summary:
    """rows: with errors, at least one."""
    errors = [(abs(row.error or 0.0), f"{row.point.series}, {row.point.at}") for row in rows]
    naive = [abs(row.naive_error or 0.0) for row in rows]
    worst, worst_at = max(errors)
    return Summary(
        measure, part, len(rows), median(error for error, _ in errors), worst, worst_at, median(naive), max(naive)
    )


def _effect_rows(effect: Effect, rows: Sequence[Row]) -> Iterator[EffectRow]:
    above, below = _by_name(effect.above, rows), _by_name(effect.below, rows)
    if effect.how == "change":
        assert effect.first is not None and effect.last is not None
        yield _effect_row(effect, "", above[effect.last], below[effect.first])
        return
    for at, row in above.items():
        if at in below and not row.point.is_left_out and not below[at].point.is_left_out:
            yield _effect_row(effect, str(at), row, below[at])


def _by_name(series: str, rows: Sequence[Row]) -> dict[Name, Row]:
    return {row.point.at: row for row in rows if row.point.series == series}


def _effect_row(effect: Effect, at: str, above: Row, below: Row) -> EffectRow:
    def value(first: Value, second: Value) -> float:
        return first - second if effect.how == "difference" else 100 * (first / second - 1)

    predicted = None
    if above.predicted is not None and below.predicted is not None:
        predicted = value(above.predicted, below.predicted)
    published = value(above.point.published, below.point.published)
    return EffectRow(effect.name, at, "GB" if effect.how == "difference" else "%", published, predicted, effect.is_sign)
