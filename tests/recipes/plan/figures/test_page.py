"""The drawing: a point for every value, in the picture, in the colour of its series."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from recipes.plan.figures.compare import Comparison, compare
from recipes.plan.figures.page import page_of
from recipes.plan.figures.points import load


class Shapes(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.circles: list[dict[str, str | None]] = []
        self.lines: list[dict[str, str | None]] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.fetched += [known[name] or "" for name in ("src", "href") if name in known]
        if tag == "circle":
            self.circles.append(known)
        elif tag == "polyline":
            self.lines.append(known)


def of_7c() -> Comparison:
    figure = load("7c")
    return compare(figure, {point: float(point.published) + 1 for point in figure.points if point.at != 512})


def test_every_value_is_a_point_inside_the_picture() -> None:
    page = page_of(of_7c(), "fsdp-launch experiment=paper/fig7c")
    shapes = Shapes()
    shapes.feed(page)
    assert shapes.fetched == []
    assert len(shapes.circles) == 14 + 12  # published, and predicted where something is told
    assert len(shapes.lines) == 2 * 3  # published, predicted, one constant
    match = re.search(r'viewBox="0 0 (\d+) (\d+)"', page)
    assert match is not None
    width, height = map(float, match.groups())
    for circle in shapes.circles:
        assert 0 < float(circle["cx"] or "") < width
        assert 0 < float(circle["cy"] or "") < height
    # larger values are higher up: 155.1 (batch 16 on 8) over 141.0 (batch 8 on 512)
    tops = {circle["cy"] for circle in shapes.circles}
    assert min(float(top or "") for top in tops) < height / 4


def test_what_users_type_cannot_break_the_page() -> None:
    page = page_of(of_7c(), "fsdp-launch 'run.name=<script>'")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
