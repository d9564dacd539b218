"""What pictures of plans share: the page's style, an SVG around shapes, rows of bars."""

from __future__ import annotations

import html
from collections.abc import Sequence

WIDTH, LEFT = 1000, 90  # pixels of a drawing, and what is left of it for names
STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1120px; color: #222; background: #fff; }
pre { background: #f6f6f4; padding: 1em; overflow-x: auto; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: #333; }
.key span { display: inline-block; margin-right: 1.2em; } .key i { display: inline-block; width: 0.9em; height: 0.9em;
margin-right: 0.35em; vertical-align: -0.1em; }
.bad { color: #b00020; } .good { color: #22662a; }
"""
_GOOD, _BAD = "#4c78a8", "#e45756"


def svg(height: float, parts: Sequence[str], left: int = LEFT) -> str:
    return f'<svg viewBox="0 0 {left + WIDTH + 10} {height:.0f}" role="img">{"".join(parts)}</svg>'


def bars_svg(rows: Sequence[tuple[str, float, str, bool]], limit: float | None = None, limit_name: str = "") -> str:
    """One bar a row: (name, length, label, is good). limit: a line across all rows."""
    left = 40 + 7 * max(len(name) for name, *_ in rows)
    longest = max([*(length for _, length, *_ in rows), limit or 0.0]) * 1.15 or 1.0
    parts = []
    for position, (name, length, label, is_good) in enumerate(rows):
        top = 4 + 22 * position
        width = WIDTH * length / longest
        parts.append(f'<text x="{left - 6}" y="{top + 13}" text-anchor="end">{html.escape(name)}</text>')
        parts.append(
            f'<rect x="{left}" y="{top}" width="{width:.1f}" height="18" fill="{_GOOD if is_good else _BAD}"/>'
        )
        parts.append(f'<text x="{left + width + 5:.1f}" y="{top + 13}">{html.escape(label)}</text>')
    bottom = 4 + 22 * len(rows)
    if limit is not None:
        x = left + WIDTH * limit / longest
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}" stroke="#222" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 12}" text-anchor="middle">{html.escape(limit_name)}</text>')
    return svg(bottom + 18, parts, left)
