"""Charts as SVG text: axes, points, lines. Colours come from the page's style, so that they follow its theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise

WIDTH, WIDE, HEIGHT = 460, 900, 300  # of one chart, in SVG units
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 14, 14, 46
_LETTER = 7.6  # width of a capital letter of a title, in SVG units
_MOST_TICKS = 7  # as many different values are marked one by one
_MOST_DECADES = 8  # marked on a logarithmic scale; beyond that every second, third, ... one
_LOG_FROM = 15.0  # largest over smallest value from which a scale is logarithmic
_MOST_NAMES = 12  # on a categorical axis; beyond that every other one is left out


@dataclass(frozen=True)
class Scale:
    """Values to places along an axis of length 1. ticks: (value, label). is_log: equal ratios, equal distances."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float) -> float:
        low, high, at = (math.log(x) if self.is_log else x for x in (self.low, self.high, value))
        return (at - low) / (high - low)


def number_scale(
    values: Sequence[float], text: Callable[[float], str], *, unit: float = 1.0, may_be_log: bool = True
) -> Scale:
    """A scale that holds all values with a little air around them. unit: what round numbers are counted in."""
    low, high = min(values), max(values)
    is_log = may_be_log and low > 0 and high / low >= _LOG_FROM
    if is_log:
        ticks = _log_ticks(low, high)
        air = (high / low) ** 0.06
        return Scale(low / air, high * air, True, tuple((tick, text(tick)) for tick in ticks))
    air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    if unit != 1.0:  # ticks are told in whole units, so at least as many apart as there are ticks
        air = max(air, (_MOST_TICKS * unit - (high - low)) / 2)
    low, high = low - air, high + air
    ticks = [tick * unit for tick in nice_ticks(low / unit, high / unit)]
    return Scale(low, high, False, tuple((tick, text(tick)) for tick in ticks))


def value_scale(values: Sequence[float], text: Callable[[float], str]) -> Scale:
    """Like ``number_scale``; a few different values are marked as they are, where that leaves them readable."""
    scale = number_scale(values, text)
    marked = sorted(set(values))
    places = [scale.place(value) for value in marked]
    if len(marked) > _MOST_TICKS or any(after - before < 0.1 for before, after in pairwise(places)):
        return scale
    return replace(scale, ticks=tuple((value, text(value)) for value in marked))


def name_scale(names: Sequence[str]) -> Scale:
    """Names at 0, 1, 2, ..."""
    every = math.ceil(len(names) / _MOST_NAMES)
    ticks = tuple((float(at), name) for at, name in enumerate(names) if at % every == 0)
    return Scale(-0.5, len(names) - 0.5, False, ticks)


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between ``low`` and ``high``, about as many as asked for."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= rough * 0.999)
    first = math.ceil(low / step)
    return [round(number * step, 12) for number in range(first, math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = list(range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1))
    num_decades = math.log10(high / low)
    factors = (1,) if num_decades > 2.5 else (1, 2, 5)
    every = math.ceil(num_decades / _MOST_DECADES)
    decades = [decade for decade in decades if decade % every == 0]
    return [factor * 10.0**decade for decade in decades for factor in factors if low <= factor * 10.0**decade <= high]


@dataclass
class Chart:
    """One picture. x, y: its scales; x_title, y_title: what they are."""

    x: Scale
    y: Scale
    x_title: str
    y_title: str
    label: str
    width: int = WIDTH
    _marks: list[str] = field(default_factory=list)

    def line(self, points: Sequence[tuple[float, float]], style: str, hint: str = "") -> None:
        """``style``: class of the page's style sheet."""
        if points:
            path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
            self._marks.append(f'<polyline class="{style}" points="{path}">{_hint(hint)}</polyline>')

    def point(self, x: float, y: float, style: str, hint: str, link: str = "") -> None:
        mark = f'<circle class="{style}" cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="4.5">{_hint(hint)}'
        mark += "</circle>"
        self._marks.append(f'<a href="#{link}">{mark}</a>' if link else mark)

    def text(self, x: float, y: float, words: str, style: str = "note") -> None:
        """Right above a point."""
        at = f'x="{self._x(x):.1f}" y="{self._y(y) - 8:.1f}"'
        self._marks.append(f'<text class="{style}" text-anchor="middle" {at}>{escape(words)}</text>')

    def svg(self) -> str:
        head = f'<svg viewBox="0 0 {self.width} {HEIGHT}" role="img" aria-label="{escape(self.label, quote=True)}">'
        return "\n".join([head, *self._axes(), *self._marks, "</svg>"])

    def _axes(self) -> list[str]:
        right, bottom = self.width - _RIGHT, HEIGHT - _BOTTOM
        marks = []
        for value, name in self.y.ticks:
            y = f"{self._y(value):.1f}"
            marks.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
            marks.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 7}" y="{y}" dy="4">{escape(name)}</text>')
        for value, name in self.x.ticks:
            x = f"{self._x(value):.1f}"
            shown = escape(name if len(name) <= 16 else f"{name[:15]}…")
            marks.append(f'<text class="tick" text-anchor="middle" x="{x}" y="{bottom + 17}">{shown}</text>')
        marks.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        middle = (_LEFT + right) / 2
        marks.append(
            f'<text class="title" text-anchor="middle" x="{middle:g}" y="{HEIGHT - 8}">'
            f"{escape(_end_of(self.x_title, round((right - _LEFT) / _LETTER)))}</text>"
        )
        marks.append(
            f'<text class="title" text-anchor="middle" transform="translate(14 {(_TOP + bottom) / 2:g}) rotate(-90)">'
            f"{escape(_end_of(self.y_title, round((bottom - _TOP) / _LETTER)))}</text>"
        )
        return marks

    def _x(self, value: float) -> float:
        return _LEFT + self.x.place(value) * (self.width - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - self.y.place(value) * (HEIGHT - _TOP - _BOTTOM)


def _end_of(words: str, longest: int) -> str:
    """What fits along an axis; of a key, its end says most."""
    return words if len(words) <= longest else f"…{words[1 - longest :]}"


def _hint(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""
