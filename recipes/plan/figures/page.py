"""figure.html: one file without anything to fetch. A drawing for each measure, then the table."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from recipes.plan.drawing import LEFT, STYLE, WIDTH, svg
from recipes.plan.figures.compare import Comparison, Row
from recipes.plan.figures.measures import MEASURES
from recipes.plan.figures.points import Name
from recipes.plan.figures.text import text_of, value_text

_COLOURS = ("#4c78a8", "#e45756", "#59a14f", "#b279a2", "#f28e2b", "#76b7b2", "#9d7660", "#bab0ab")
_HEIGHT, _TOP = 320, 12  # pixels of the plotted area, and above it


def page_of(found: Comparison, command: str) -> str:
    """The whole page. command: what was typed."""
    figure = found.figure
    heading = f"Figure {figure.name}: {figure.title}"
    drawings = "\n".join(_drawing(found, measure) for measure in figure.measures if not MEASURES[measure].is_flag)
    read = "\n".join(f"{name}: {how}" for name, how in figure.read.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(heading)}</title><style>{STYLE}</style></head><body>
<h1>{html.escape(heading)}</h1>
<p>Filled points and solid lines: published in the FSDP paper (arXiv 2304.11277). Open points and broken lines: computed
from configs. Dotted: one constant for the series, what a planner has to beat.</p>
{drawings}
<h2>Numbers</h2>
<pre>{html.escape(text_of(found))}</pre>
<h2>How the published values were read</h2>
<pre>{html.escape(read)}</pre>
<p>{html.escape(command)}</p>
</body></html>
"""


def _drawing(found: Comparison, measure: str) -> str:
    rows = [row for row in found.rows if row.point.measure == measure]
    names = list(dict.fromkeys(row.point.series for row in rows))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    key = "".join(
        f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>' for name, colour in colours.items()
    )
    unit = MEASURES[measure].unit
    return f'<h2>{html.escape(unit)}</h2>\n{drawing_svg(rows, colours, found.figure.x)}\n<p class="key">{key}</p>'


def drawing_svg(rows: Sequence[Row], colours: dict[str, str], x_name: str) -> str:
    """The rows of one measure over the x axis, whose points lie at equal distances."""
    columns = _columns(rows)
    lowest, highest = _range(rows)
    step = WIDTH / len(columns)
    place = {at: LEFT + (index + 0.5) * step for index, at in enumerate(columns)}

    def y(value: float) -> float:
        return _TOP + _HEIGHT * (highest - value) / (highest - lowest)

    parts = [*_axes(place, lowest, highest, rows[0].point.measure, x_name)]
    for name, colour in colours.items():
        own = [row for row in rows if row.point.series == name]
        published = [(place[row.point.at], y(float(row.point.published))) for row in own]
        told = [(place[row.point.at], y(float(row.predicted))) for row in own if row.predicted is not None]
        parts += _line(published, colour, "")
        parts += _line(told, colour, "6 4")
        if own[0].naive is not None:
            level = y(own[0].naive)
            parts += _line([(published[0][0], level), (published[-1][0], level)], colour, "1 4")
        parts += [
            _dot(at, colour, colour, row, "paper", row.point.published) for at, row in zip(published, own, strict=True)
        ]
        shown = [row for row in own if row.predicted is not None]
        parts += [
            _dot(at, colour, "#fff", row, "predicted", row.predicted) for at, row in zip(told, shown, strict=True)
        ]
    return svg(_TOP + _HEIGHT + 36, parts)


def _columns(rows: Sequence[Row]) -> list[Name]:
    """Names of the x axis; numbers in their order."""
    names = list(dict.fromkeys(row.point.at for row in rows))
    return sorted(names, key=float) if all(isinstance(name, int) for name in names) else names


def _range(rows: Sequence[Row]) -> tuple[float, float]:
    """Lowest and highest value of the y axis, with a margin."""
    values = [float(row.point.published) for row in rows]
    values += [float(row.predicted) for row in rows if row.predicted is not None]
    margin = 0.08 * (max(values) - min(values)) or 0.05 * abs(max(values)) or 1.0
    return min(values) - margin, max(values) + margin


def _axes(place: dict[Name, float], lowest: float, highest: float, measure: str, x_name: str) -> Iterator[str]:
    bottom = _TOP + _HEIGHT
    for part in range(5):
        value = lowest + (highest - lowest) * part / 4
        y = bottom - _HEIGHT * part / 4
        yield f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value_text(measure, value)}</text>'
    for name, x in place.items():
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{html.escape(str(name))}</text>'
    yield f'<text x="{LEFT + WIDTH / 2:.0f}" y="{bottom + 32}" text-anchor="middle">{html.escape(x_name)}</text>'


def _line(points: Sequence[tuple[float, float]], colour: str, dashes: str) -> list[str]:
    if len(points) < 2:
        return []
    along = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    broken = f' stroke-dasharray="{dashes}"' if dashes else ""
    return [f'<polyline points="{along}" fill="none" stroke="{colour}" stroke-width="1.5"{broken}/>']


def _dot(at: tuple[float, float], colour: str, inside: str, row: Row, who: str, value: float | None) -> str:
    what = f"{row.point.series}, {row.point.at}: {who} {value_text(row.point.measure, value)}"
    return (
        f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="4" fill="{inside}" stroke="{colour}" stroke-width="1.5">'
        f"<title>{html.escape(what)}</title></circle>"
    )
