"""plan.html: one file without anything to fetch. Streams over one step, memory over the same step, the table."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from fsdp_core.simulate import tape as t
from fsdp_core.simulate.timeline import Span
from recipes.amounts import gb
from recipes.plan.drawing import LEFT, STYLE, WIDTH, svg
from recipes.plan.kinds import kinds_of
from recipes.plan.predict import Prediction
from recipes.plan.result import KINDS, Plan
from recipes.plan.table import seconds, text_of
from recipes.plan.timing import step_spans

_LANES = ("compute", "channel", "gather", "reduce")
_NAMES = {"compute": "compute", "channel": "collectives", "gather": "gather stream", "reduce": "reduce stream"}
_COLOURS = {
    "forward": "#4c78a8",
    "backward": "#e45756",
    "": "#9d9da1",
    "all_gather": "#59a14f",
    "reduce_scatter": "#b279a2",
    "all_reduce": "#f28e2b",
    "all_to_all": "#76b7b2",
    "broadcast": "#9d9da1",
}
_KIND_COLOURS = dict(
    zip(KINDS, ("#4c78a8", "#e45756", "#f28e2b", "#59a14f", "#b279a2", "#bab0ab", "#9d7660"), strict=True)
)


def page_of(prediction: Prediction, title: str) -> str:
    """The whole page. title: what was planned, for people."""
    plan = prediction.plan
    heading = html.escape(title)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Plan: {heading}</title><style>{STYLE}</style></head><body>
<h1>Plan: {heading}</h1>
<p class="{"good" if plan.rates is not None else "bad"}">{html.escape(_verdict(plan))}</p>
<h2>One step</h2>
{timeline_svg(prediction)}
{_key({name: _COLOURS[name] for name in ("forward", "backward", "all_gather", "reduce_scatter", "all_reduce")})}
<h2>Memory over the step, in the host's order</h2>
{memory_svg(prediction)}
{_key({kind: _KIND_COLOURS[kind] for kind in KINDS if plan.memory.peak_by_kind.get(kind)})}
<h2>Numbers</h2>
<pre>{html.escape(text_of(plan))}</pre>
</body></html>
"""


def _verdict(plan: Plan) -> str:
    if not plan.fits:
        return f"Does not fit: {gb(plan.memory.needed)} needed, {gb(plan.memory.usable)} usable."
    if plan.rates is None:
        return f"Fits only with {plan.memory.num_alloc_retries} allocator retries a step: no speed is told."
    return f"Fits: {gb(plan.memory.reserved)} of {gb(plan.memory.usable)}; {seconds(plan.time.step_s)} a step."


def _key(colours: dict[str, str]) -> str:
    entries = (
        f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>' for name, colour in colours.items()
    )
    return f'<p class="key">{"".join(entries)}</p>'


# -- streams -----------------------------------------------------------------------------------------------------------


def timeline_svg(prediction: Prediction) -> str:
    """Every stream a row, seconds to the right. Neighbours of a unit and phase closer than a pixel become one bar."""
    spans, start, end = step_spans(prediction.timeline)
    scale = WIDTH / max(end - start, 1e-12)
    lanes = [lane for lane in _LANES if any(span.lane == lane for span in spans)]
    parts, row = [], 26
    for position, lane in enumerate(lanes):
        top = 4 + position * row
        parts.append(f'<text x="0" y="{top + 14}">{_NAMES[lane]}</text>')
        for first, last, colour, label in _bars([s for s in spans if s.lane == lane], 1 / scale):
            x = LEFT + max(0.0, (first - start) * scale)
            width = min(LEFT + WIDTH - x, max(0.4, (last - max(first, start)) * scale))
            parts.append(
                f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="20" fill="{colour}">'
                f"<title>{html.escape(label)}</title></rect>"
            )
    bottom = 4 + len(lanes) * row
    parts.extend(_axis(bottom, [seconds((end - start) * part / 4) for part in range(5)]))
    return svg(bottom + 22, parts)


def _bars(spans: Sequence[Span], pixel_s: float) -> Iterator[tuple[float, float, str, str]]:
    """(start, end, colour, label)."""
    bar: tuple[float, float, str, str] | None = None
    for span in spans:
        is_channel = span.lane == "channel"
        colour = _COLOURS.get(span.name if is_channel else span.phase, _COLOURS[""])
        what = f"{span.name} " if is_channel else ""
        label = f"{what}{span.unit or 'outside units'} {span.phase}".strip()
        if (
            bar is not None
            and bar[2] == colour
            and span.start_s - bar[1] < pixel_s
            and (bar[3] == label or bar[1] - bar[0] < pixel_s)
        ):
            bar = (bar[0], max(bar[1], span.end_s), colour, bar[3])
            continue
        if bar is not None:
            yield bar
        bar = (span.start_s, span.end_s, colour, label)
    if bar is not None:
        yield bar


# -- memory ------------------------------------------------------------------------------------------------------------


def memory_svg(prediction: Prediction) -> str:
    """Bytes by kind, stacked; lines of what is active, reserved and usable."""
    columns = _columns(prediction)
    memory = prediction.plan.memory
    highest = 1.05 * max(memory.reserved, memory.allocated, min(memory.usable, 2 * memory.reserved), 1)
    height = 260
    scale_x, scale_y = WIDTH / max(len(columns) - 1, 1), height / highest
    parts = []
    below = [0.0] * len(columns)
    for kind in KINDS:
        if not memory.peak_by_kind.get(kind):
            continue
        above = [low + column.get(kind, 0) for low, column in zip(below, columns, strict=True)]
        edge = [(LEFT + i * scale_x, 4 + height - value * scale_y) for i, value in enumerate(above)]
        floor = [(LEFT + i * scale_x, 4 + height - value * scale_y) for i, value in enumerate(below)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*edge, *reversed(floor)))
        parts.append(f'<polygon points="{points}" fill="{_KIND_COLOURS[kind]}"><title>{kind}</title></polygon>')
        below = above
    for name, value in (("usable", memory.usable), ("reserved", memory.reserved), ("active", memory.active)):
        y = 4 + height - value * scale_y
        if y >= 4:
            parts.append(
                f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#222" '
                'stroke-dasharray="4 3"/>'
                f'<text x="{LEFT + WIDTH - 4}" y="{y - 3:.1f}" text-anchor="end">{name} {gb(value)}</text>'
            )
    for part in range(5):
        y = 4 + height * (1 - part / 4)
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{gb(highest * part / 4)}</text>')
    parts.extend(_axis(height + 4, ["begins", "", "", "", "ends"]))
    return svg(height + 26, parts)


def _columns(prediction: Prediction, number: int = 500) -> list[dict[str, int]]:
    """Live bytes by kind at each of about ``number`` moments of the last step: of each stretch, its largest sum."""
    recorded = prediction.recorded
    tape, first = recorded.tape, recorded.last_step
    kinds = kinds_of(tape, first, recorded.gradients)
    live: dict[str, int] = {}
    sizes: dict[int, int] = {}
    stretch = max(1, (len(tape.entries) - first) // number)
    columns: list[dict[str, int]] = []
    most = -1
    for index, entry in enumerate([*tape.held, *tape.entries]):
        if isinstance(entry, t.Alloc):
            sizes[entry.block] = entry.nbytes
            live[kinds[entry.block]] = live.get(kinds[entry.block], 0) + entry.nbytes
        elif isinstance(entry, t.Free):
            live[kinds[entry.block]] -= sizes.pop(entry.block)
        position = index - len(tape.held) - first
        if position < 0:
            continue
        if position % stretch == 0:
            columns.append(dict(live))
            most = sum(live.values())
        elif (total := sum(live.values())) > most:
            columns[-1], most = dict(live), total
    return columns


def _axis(y: float, labels: Sequence[str]) -> Iterator[str]:
    yield f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}" stroke="#888"/>'
    anchors = ("start", "middle", "middle", "middle", "end")
    for part, label in enumerate(labels):
        x = LEFT + WIDTH * part / (len(labels) - 1)
        yield f'<text x="{x:.0f}" y="{y + 14}" text-anchor="{anchors[part]}">{label}</text>'
