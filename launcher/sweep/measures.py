"""What a run folder says about its run, as columns: read from summary.json and metrics.jsonl, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.files import read_lines
from recipes.plan.compared import columns_of

LOSS = "train_loss"
HELD_OUT = "eval_loss"
MEMORY = ("peak_reserved_bytes", "peak_allocated_bytes", "peak_rss_bytes")  # the first that there is
_OF_SUMMARY = (LOSS, "step_s", "units_per_s", "mfu", "train_s", "wall_s", "num_parameters", "world_size", "sent_bytes")
MAX_POINTS = 400  # of a curve in the report


def measures_of(run_dir: Path) -> dict[str, float]:
    """Columns of one run, those that are known; of a run that did not end well, what its lines say.

    train_loss: of the last step. eval_*: the last evaluation. best_*: the lowest on the way. step_s: median.
    memory_bytes: the peak over all ranks and steps. sent_bytes: by rank 0 to the others in the whole run.
    plan_*: what a plan of the run says; *_over_plan: what was measured over it.
    """
    lines = _lines(run_dir / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    found: dict[str, float] = {}
    if steps:
        found["steps"] = steps[-1]["step"]
        found[LOSS] = steps[-1]["loss"]
        found["step_s"] = _median([line["step_s"] for line in steps if line.get("step_s")])
        for name in MEMORY:
            found[name] = max((line.get(name) or 0 for line in steps), default=0)
    for line in lines:
        for name, value in line.items():
            if name.startswith("eval_"):
                found[name] = value
    for name in (LOSS, HELD_OUT):
        values = [line[column] for line in lines if (column := "loss" if name == LOSS else name) in line]
        finite = [value for value in values if value is not None]
        if finite:
            found[f"best_{name}"] = min(finite)
    found.update(_of_summary(run_dir / "summary.json"))
    memory = [found.pop(name, 0) for name in MEMORY]
    found["memory_bytes"] = next((value for value in memory if value), 0)
    return {name: value for name, value in found.items() if _is_number(value) and (value or not name.endswith("bytes"))}


def curve(run_dir: Path) -> list[tuple[int, float]]:
    """(step, training loss), thinned evenly to at most ``MAX_POINTS``, last point kept."""
    points = [
        (line["step"], line["loss"]) for line in _lines(run_dir / "metrics.jsonl") if line.get("loss") is not None
    ]
    stride = math.ceil(len(points) / MAX_POINTS) or 1
    return points[::stride] + (points[-1:] if points and (len(points) - 1) % stride else [])


def default_metric(columns: Mapping[str, object]) -> str:
    return HELD_OUT if HELD_OUT in columns else LOSS


def _of_summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = {name: summary.get(name) for name in _OF_SUMMARY}
    found.update({f"eval_{name}": value for name, value in (summary.get("evaluation") or {}).items()})
    found.update(summary.get("peak_memory") or {})
    found.update(columns_of(summary.get("plan") or {}))
    return {name: value for name, value in found.items() if value is not None}


def _median(values: list[float]) -> float:
    middle = sorted(values)
    return middle[len(middle) // 2] if middle else math.nan


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Lines of steps and evaluations; none where the file cannot be read."""
    try:
        return [line for line in read_lines(path) if "step" in line]
    except OSError:
        return []
