"""A figure as lines for people: every point, the errors, the effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recipes.plan.figures.compare import NO_SPEED, Comparison, EffectRow, Row, Summary
from recipes.plan.figures.measures import MEASURES, Value
from recipes.plan.table import aligned

_NOTHING = "-"


def text_of(found: Comparison) -> str:
    """The table of a figure, its errors and its effects."""
    figure = found.figure
    parts = [f"figure {figure.name} of the FSDP paper: {figure.title}", aligned(_rows(found))]
    parts += [f"{name}: not predicted, {why}" for name, why in _reasons(found).items()]
    if found.summaries:
        parts.append(aligned([*_summaries(found)]))
    if found.effects:
        parts.append(effects_text(found.effects, figure.x))
    return "\n".join(parts)


def value_text(measure: str, value: Value | None) -> str:
    """Without its unit; flags as yes and no."""
    if value is None:
        return _NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.{MEASURES[measure].digits}f}"


def _rows(found: Comparison) -> list[tuple[str, ...]]:
    header = ("series", found.figure.x, "unit", "paper", "predicted", "error", "one constant", "")
    return [header, *(_row(row) for row in found.rows)]


def _row(row: Row) -> tuple[str, ...]:
    point = row.point
    error = _signed(row.error)
    if row.agrees is not None:
        error = "agrees" if row.agrees else "differs"
    return (
        point.series,
        str(point.at),
        MEASURES[point.measure].unit,
        _published(row),
        value_text(point.measure, row.predicted),
        error,
        _signed(row.naive_error),
        _remark(row),
    )


def _published(row: Row) -> str:
    """As many digits as were read."""
    value = row.point.published
    return value_text(row.point.measure, value) if isinstance(value, bool) else f"{value:g}"


def _remark(row: Row) -> str:
    if row.predicted is None and row.why_not == NO_SPEED:
        return NO_SPEED
    if row.point.is_calibration:
        return "fitted"
    return "" if row.point.is_counted or row.is_flag else "not counted"


def _signed(percent: float | None) -> str:
    return _NOTHING if percent is None else f"{percent:+.1f} %"


def _reasons(found: Comparison) -> dict[str, str]:
    """By series, what keeps all its points from being computed."""
    return {row.point.series: row.point.not_predicted for row in found.rows if row.point.not_predicted}


def _summaries(found: Comparison) -> Iterator[tuple[str, ...]]:
    yield "errors", "points", "median", "worst", "", "one constant a series: median", "worst"
    for one in found.summaries:
        yield _summary(one)


def _summary(one: Summary) -> tuple[str, ...]:
    return (
        f"{MEASURES[one.measure].unit}, {one.part}",
        str(one.number),
        f"{one.median:.2f} %",
        f"{one.worst:.2f} %",
        f"({one.worst_at})",
        f"{one.naive_median:.2f} %",
        f"{one.naive_worst:.2f} %",
    )


def effects_text(effects: Sequence[EffectRow], x: str) -> str:
    """A row an effect. x: what its column of points is called."""
    header = ("effects", x, "paper", "predicted", "apart")
    return aligned([header, *(_effect(one) for one in effects)])


def _effect(one: EffectRow) -> tuple[str, ...]:
    def text(value: float | None) -> str:
        return _NOTHING if value is None else f"{value:+.1f} {one.unit}"

    apart = _NOTHING
    if one.apart is not None:
        apart = f"{one.apart:.1f} {'points' if one.unit == '%' else one.unit}"
    if one.is_sign and one.has_sign is not None:
        apart = "same sign" if one.has_sign else "other sign"
    return one.name, one.at, text(one.published), text(one.predicted), apart
