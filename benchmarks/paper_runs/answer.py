"""What an experiment gives: tables, numbers and a picture, and the words that say what they are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_bench.report import paired_ratio

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", "| " + " | ".join(self.header) + " |", "|" + "---|" * len(self.header)]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in self.rows)])


@dataclass(frozen=True)
class Chart:
    """A line for each name; ``log_x``: the horizontal axis in powers of two."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Points]
    log_x: bool = False


@dataclass(frozen=True)
class Answer:
    """statement: what the paper says, with its section, and what it left open. conditions: how this was measured.
    data: everything measured, for the JSON file. skipped: why there is no answer here."""

    statement: str
    conditions: str
    tables: Sequence[Table] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    chart: Chart | None = None
    skipped: str = ""

    def markdown(self) -> str:
        parts = [f"**The paper.** {self.statement}", f"**Conditions.** {self.conditions}"]
        parts += [table.markdown() for table in self.tables]
        if self.skipped:
            parts.append(f"Not measured: {self.skipped}")
        return "\n\n".join(parts)


def mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f}"


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of blocks of the same round, so that what drifts between rounds drops out."""
    return paired_ratio(ours, theirs).median


def draw(chart: Chart, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.8), layout="constrained")
    for place, (name, points) in enumerate(chart.lines.items()):
        width = 4 - 3 * place / max(1, len(chart.lines) - 1)  # so that a line under another one is seen
        axes.plot([x for x, _ in points], [y for _, y in points], linewidth=width, marker="o", markersize=3, label=name)
    if chart.log_x:
        axes.set_xscale("log", base=2)
    axes.set_title(chart.title, fontsize=10)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
