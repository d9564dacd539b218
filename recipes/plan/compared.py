"""Numbers of a plan beside those of the run it stands for, and what people and files are told of them. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recipes.amounts import memory

FILE = "plan.json"  # in the run folder
# What a line for people says of each; first the numbers that a user can do something about.
_TOLD = {
    "step_s": "step",
    "reserved_bytes": "reserved",
    "allocated_bytes": "allocated",
    "engine_bytes": "engine's memory",
    "sent_bytes": "sent in a step",
}
# Where a run's memory is one number (a sweep's table), it is the first of these.
_MEMORY = ("reserved_bytes", "allocated_bytes", "engine_bytes")


@dataclass(frozen=True)
class Compared:
    """One number, in the unit that its name ends in."""

    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return self.measured / self.predicted if self.predicted else None


@dataclass(frozen=True)
class Beside:
    """rows: what could be compared. notes: lines for people: what could not, and why."""

    rows: tuple[Compared, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        rows = {
            row.name: {"predicted": row.predicted, "measured": row.measured, "ratio": row.ratio} for row in self.rows
        }
        return {"compared": rows, "notes": list(self.notes)}

    def lines(self) -> Iterator[tuple[str, str]]:
        """Name and text of each line of a summary."""
        by_name = {row.name: row for row in self.rows}
        for name, title in _TOLD.items():
            if name in by_name:
                row = by_name[name]
                yield f"planned: {title}", f"{_text(row, row.predicted)}, was {_text(row, row.measured)}{_times(row)}"
        for note in self.notes:
            yield "plan", note


def columns_of(plain: Mapping[str, Any]) -> dict[str, float]:
    """Columns of a sweep's table from ``Beside.as_json``: what was planned, and measured over planned."""
    rows = plain.get("compared") or {}
    found: dict[str, float] = {}
    memory_name = next((name for name in _MEMORY if name in rows), None)
    for column, name in (("step", "step_s"), ("memory", memory_name), ("sent", "sent_bytes")):
        if name is None or name not in rows:
            continue
        found[f"plan_{column}_{name.rpartition('_')[2]}"] = rows[name]["predicted"]
        if rows[name]["ratio"] is not None:
            found[f"{column}_over_plan"] = rows[name]["ratio"]
    return found


def markdown_of(plain: Mapping[str, Any]) -> str:
    """A table from ``Beside.as_json``; units as the names end."""
    rows = [
        f"| {name} | {row['predicted']:.6g} | {row['measured']:.6g} | {_ratio(row['ratio'])} |"
        for name, row in plain["compared"].items()
    ]
    head = ["| of a rank | planned | measured | measured / planned |", "|---|---|---|---|"]
    return "\n".join([*(head if rows else []), *rows, "", *plain["notes"]])


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _text(row: Compared, value: float) -> str:
    if row.name.endswith("_s"):
        return f"{1e3 * value:.4g} ms"
    if not row.name.endswith("_bytes"):
        return f"{value:g}"
    return memory(value) if value >= 10 * 2**20 else f"{value / 2**10:.0f} KiB"


def _times(row: Compared) -> str:
    return "" if row.ratio is None else f" ({row.ratio:.2f} x)"
