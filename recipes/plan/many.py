"""Several plans side by side: one table, one plan.json, one picture of memory and time."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path

from recipes.amounts import gb
from recipes.plan.answer import as_json
from recipes.plan.drawing import STYLE, bars_svg
from recipes.plan.result import Plan
from recipes.plan.table import HEADER, aligned, row_of, seconds, verdict

Labels = Sequence[tuple[str, ...]]


def table_of(swept: tuple[str, ...], labels: Labels, plans: Sequence[Plan]) -> str:
    """labels: of each plan, the values of the swept keys."""
    rows = [("job", *swept, *HEADER)]
    rows += [(str(i), *label, *row_of(plan)) for i, (label, plan) in enumerate(zip(labels, plans, strict=True))]
    return aligned(rows)


def write(folder: Path, swept: tuple[str, ...], labels: Labels, plans: Sequence[Plan], table: str) -> None:
    """plan.json and plan.html."""
    jobs = [
        {"swept": dict(zip(swept, label, strict=True)), "plan": as_json(plan)}
        for label, plan in zip(labels, plans, strict=True)
    ]
    (folder / "plan.json").write_text(json.dumps({"jobs": jobs}, indent=2) + "\n", encoding="utf-8")
    (folder / "plan.html").write_text(page_of(swept, labels, plans, table), encoding="utf-8")


def page_of(swept: tuple[str, ...], labels: Labels, plans: Sequence[Plan], table: str) -> str:
    names = [" ".join(label) or "all" for label in labels]
    memory = [
        (name, plan.memory.needed, gb(plan.memory.needed), plan.fits) for name, plan in zip(names, plans, strict=True)
    ]
    limit = min(plan.memory.usable for plan in plans)
    times = [
        (
            name,
            0.0 if plan.rates is None else plan.time.step_s * 1.0,
            verdict(plan) if plan.rates is None else seconds(plan.time.step_s),
            plan.rates is not None,
        )
        for name, plan in zip(names, plans, strict=True)
    ]
    heading = html.escape(", ".join(swept) or "plans")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Plans over {heading}</title><style>{STYLE}</style></head><body>
<h1>Plans over {heading}</h1>
<h2>Memory that one rank needs</h2>
{bars_svg(memory, limit, f"usable {gb(limit)}")}
<h2>Time of a step</h2>
{bars_svg(times)}
<h2>Numbers</h2>
<pre>{html.escape(table)}</pre>
</body></html>
"""
