"""metrics.jsonl: one JSON object a line, one line a step, evaluations on lines of their own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from recipes.loggers.base import FROM_THE_BEGINNING, Logger, Start, Value


class JsonlLogger(Logger):
    """Continues a file behind ``start``: lines of what is run again are dropped, so that no step is there twice.

    What is kept is written beside the file and takes its place at once: a reader, and a kill, meet a whole file.
    """

    def __init__(self, path: Path, start: Start = FROM_THE_BEGINNING) -> None:
        beside = path.with_name(path.name + ".tmp")
        with beside.open("w", encoding="utf-8") as file:
            for line in read_lines(path) if path.exists() else []:
                if start.has_line(line):
                    file.write(json.dumps(line) + "\n")
        beside.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        line = {"step": step} | {name: strict(value) for name, value in metrics.items() if name != "step"}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self, summary: Mapping[str, object] | None) -> None:
        self._file.close()


def strict(value: Value) -> Value:
    """JSON has no NaN and no infinity: null, as where a number is not known."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_lines(path: Path) -> list[dict]:
    """All complete lines; a line that is none of ours, as one cut short by a killed process, is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
