"""report.html: the sweep in pictures, in one file that needs no network and no script."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from statistics import median

from launcher import failure
from launcher.streams import visible
from launcher.sweep import states
from launcher.sweep.chart import WIDE, Chart, Scale, name_scale, number_scale, value_scale
from launcher.sweep.measures import LOSS, curve
from launcher.sweep.record import Job
from launcher.sweep.report_style import STYLE
from launcher.sweep.table import LONGEST_ERROR, Results, counts, error_line, readable, rows, title

_NUM_COLOURS = 6  # curves that get a colour of their own; the others are grey
_LOG_LINES = 12
_LONG_CELL = 48  # letters
_CROWD = 60  # jobs
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{heading}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def report_page(results: Results, name: str, command: Sequence[str]) -> str:
    """The whole page. name: of the sweep's folder; command: that started it."""
    sections = [
        _head(results, name, command),
        _by_key(results),
        _costs(results),
        _curves(results),
        _all_jobs(results),
        _failures(results),
    ]
    heading = escape(f"{name}: {counts(results.jobs)}")
    return _PAGE.format(heading=heading, style=STYLE, body="\n".join(section for section in sections if section))


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other one beats in both numbers, the smaller the better; by their first number."""
    front: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _head(results: Results, name: str, command: Sequence[str]) -> str:
    chips = "".join(
        f'<span class="chip {state}">{number} {state}</span>'
        for state in states.ALL
        if (number := sum(job.state == state for job in results.jobs))
    )
    best = results.best()
    told = ""
    if best is not None:
        value = readable(results.metric, results.value(best, results.metric) or 0.0)
        told = (
            f'<p class="best">Best {escape(title(results.metric))}: <strong>{value}</strong>, '
            f'<a href="#job-{best.number}">job {best.number}</a> <code>{escape(_swept(best))}</code></p>'
        )
    elif any(job.state == states.DONE for job in results.jobs):
        told = f'<p class="aside">No job that is done has a number for its {escape(title(results.metric))}.</p>'
    return (
        f"<header><h1>{escape(name)}</h1><p>{chips}</p>{told}"
        f"<pre><code>{escape(shlex.join(command))}</code></pre></header>"
    )


def _by_key(results: Results) -> str:
    """The metric against each swept key, one picture a key."""
    jobs = [job for job in results.jobs if results.value(job, results.metric) is not None]
    pictures = [_against(results, jobs, key) for key in results.swept if len({job.swept.get(key) for job in jobs}) > 1]
    return _section(
        f"{title(results.metric)} by what was swept", pictures, "Each dot is a job; the line joins medians."
    )


def _against(results: Results, jobs: Sequence[Job], key: str) -> str:
    texts = [job.swept.get(key, "") for job in jobs]
    numbers = [_number(text) for text in texts]
    known = [number for number in numbers if number is not None]
    if len(known) == len(numbers):
        x, places = value_scale(known, lambda value: f"{value:g}"), known
    else:
        names = list(dict.fromkeys(texts))
        x, places = name_scale(names), [float(names.index(text)) for text in texts]
    values = [results.value(job, results.metric) or 0.0 for job in jobs]
    chart = Chart(x, _scale(results.metric, values), key, title(results.metric), f"{results.metric} against {key}")
    by_place: dict[float, list[float]] = {}
    for place, value in zip(places, values, strict=True):
        by_place.setdefault(place, []).append(value)
    chart.line([(place, median(found)) for place, found in sorted(by_place.items())], "trend")
    best, crowd = results.best(), _crowd(jobs)
    for is_best in (False, True):  # the best one is drawn last, above the others
        for job, place, value in zip(jobs, places, values, strict=True):
            if is_best == (job is best):
                style = "dot best" if is_best else crowd
                chart.point(place, value, style, _hint(results, job), f"job-{job.number}")
    return chart.svg()


def _costs(results: Results) -> str:
    """Time of a step against memory of a rank, with the jobs that no other job beats in both."""
    jobs = [job for job in results.jobs if results.value(job, "step_s") and results.value(job, "memory_bytes")]
    if not jobs:
        return ""
    points = [(1e3 * (results.value(job, "step_s") or 0), results.value(job, "memory_bytes") or 0) for job in jobs]
    x = number_scale([x for x, _ in points], lambda value: f"{value:g}", may_be_log=False)
    chart = Chart(
        x, _scale("memory_bytes", [y for _, y in points]), "ms per step", "peak memory", "time against memory"
    )
    front = pareto_front(points)
    stairs = [corner for (x0, y0), (x1, _) in pairwise(front) for corner in ((x0, y0), (x1, y0))]
    chart.line([*stairs, *front[-1:]], "front")
    named: dict[tuple[float, float], list[int]] = {}
    crowd = _crowd(jobs)
    for job, point in zip(jobs, points, strict=True):
        is_front = point in front
        chart.point(*point, "dot best" if is_front else crowd, _hint(results, job), f"job-{job.number}")
        named.setdefault(point, []).append(job.number)
    for point in front:
        first, *others = named[point]
        chart.text(*point, f"{first} +{len(others)}" if others else str(first))
    return _section("Time against memory", [chart.svg()], "On the line: jobs that no other one beats in both.")


def _curves(results: Results) -> str:
    """Training loss over steps, all jobs together."""
    found = [(job, points) for job in results.jobs if len(points := curve(job.run_dir)) > 1]
    if not found:
        return ""
    order = _by_metric(results)
    losses = [loss for _, points in found for _, loss in points]
    x = number_scale([float(step) for _, points in found for step, _ in points], lambda v: f"{v:g}", may_be_log=False)
    chart = Chart(x, _scale(LOSS, losses), "step", "train loss", "loss curves", WIDE)
    coloured = [job.number for job in order if any(job.number == other.number for other, _ in found)][:_NUM_COLOURS]
    for job, points in sorted(found, key=lambda pair: pair[0].number in coloured):
        style = f"curve c{coloured.index(job.number)}" if job.number in coloured else "curve rest"
        chart.line([(float(step), loss) for step, loss in points], style, _hint(results, job))
    swept = {job.number: _swept(job) for job in results.jobs}
    legend = "".join(
        f'<li><span class="swatch s{place}"></span><a href="#job-{number}">job {number}</a> '
        f"<code>{escape(swept[number])}</code></li>"
        for place, number in enumerate(coloured)
    )
    rest = (
        ""
        if len(found) == len(coloured)
        else f'<li><span class="swatch"></span>{len(found) - len(coloured)} others</li>'
    )
    return _section("Loss curves", [chart.svg() + f'<ul class="legend">{legend}{rest}</ul>'], "", "wide")


def _all_jobs(results: Results) -> str:
    header, *body = rows(results)
    state_at = header.index("state")
    head = "".join(f"<th{_long(cell)}>{escape(cell)}</th>" for cell in header)
    lines = []
    for job, row in zip(results.jobs, body, strict=True):
        cells = "".join(
            f'<td><span class="chip {escape(cell)}">{escape(cell)}</span></td>'
            if place == state_at
            else f"<td{_long(cell)}>{escape(cell)}</td>"
            for place, cell in enumerate(row)
        )
        lines.append(f'<tr id="job-{job.number}">{cells}</tr>')
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    return f"<section><h2>All jobs</h2>{table}</section>"


def _long(cell: str) -> str:
    """The class of a cell that is broken into lines."""
    return ' class="long"' if len(cell) > _LONG_CELL else ""


def _crowd(jobs: Sequence[Job]) -> str:
    """The style of dots: where there are many, their rims would hide the dots below."""
    return "dot" if len(jobs) <= _CROWD else "dot crowd"


def _failures(results: Results) -> str:
    unwell = [job for job in results.jobs if job.end is not None and job.state not in (states.DONE, states.CANCELLED)]
    if not unwell:
        return ""
    blocks = []
    for job in unwell:
        end = job.end
        assert end is not None
        error = error_line(job) or states.MEANING.get(job.state, "")
        whole = (
            f"<pre>{escape(visible(end.error))}</pre>" if len(end.error) > LONGEST_ERROR or "\n" in end.error else ""
        )
        last = failure.last_lines(job.log, _LOG_LINES)
        blocks.append(
            f'<details class="failure"><summary><span class="chip {job.state}">{job.state}</span> '
            f'<a href="#job-{job.number}">job {job.number}</a> <code>{escape(_swept(job))}</code> '
            f"<strong>{escape(error)}</strong></summary>{whole}"
            f"<p>log: <code>{escape(str(job.log))}</code></p><pre>{escape(visible(last))}</pre></details>"
        )
    return f"<section><h2>Jobs that did not reach their end</h2>{''.join(blocks)}</section>"


def _section(heading: str, pictures: Sequence[str], note: str, style: str = "") -> str:
    if not pictures:
        return ""
    figures = "".join(f"<figure>{picture}</figure>" for picture in pictures)
    told = f'<p class="aside">{escape(note)}</p>' if note else ""
    return f'<section class="{style}"><h2>{escape(heading)}</h2>{told}<div class="figures">{figures}</div></section>'


def _scale(column: str, values: Sequence[float]) -> Scale:
    unit = 1.0
    if column.endswith("bytes"):
        unit = 2.0**30 if max(values) >= 2**32 else 2.0**20
    return number_scale(values, lambda value: readable(column, value), unit=unit)


def _by_metric(results: Results) -> list[Job]:
    """Jobs with a metric first, the best ahead."""
    sign = 1.0 if results.is_small_good else -1.0

    def key(job: Job) -> tuple[bool, float]:
        value = results.value(job, results.metric)
        return value is None, 0.0 if value is None else sign * value

    return sorted(results.jobs, key=key)


def _hint(results: Results, job: Job) -> str:
    value = results.value(job, results.metric)
    told = "" if value is None else f"\n{title(results.metric)} {readable(results.metric, value)}"
    return f"job {job.number}, {job.state}\n{_swept(job)}{told}"


def _swept(job: Job) -> str:
    return " ".join(f"{key}={value}" for key, value in job.swept.items())


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
