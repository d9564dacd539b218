"""What a search may choose from: the swept overrides as dimensions. Hydra's grammar, no optuna."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep

from launcher.errors import Problem

Value = float | int | str


@dataclass(frozen=True)
class Dimension:
    """One swept key.

    choices: of a list, as typed; empty for numbers. low, high: of numbers, both included; step: None where every
    number between is possible. is_log: small and large numbers are tried equally often.
    """

    key: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    is_int: bool = False
    is_log: bool = False

    def first(self) -> Value:
        return self.choices[0] if self.choices else self.number(self.low)

    def number(self, value: float) -> Value:
        return int(value) if self.is_int else float(value)


def dimensions_of(overrides: Sequence[Override], config_loader: Any) -> tuple[list[Dimension], list[Problem]]:
    """Every swept override as a dimension, and what is wrong with those that are none."""
    dimensions, problems = [], []
    for override in overrides:
        if not override.is_sweep_override():
            continue
        found = _dimension(override, config_loader)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            dimensions.append(found)
    return dimensions, problems


def with_values(overrides: Sequence[Override], values: Mapping[str, Value]) -> list[Override]:
    """The overrides of one job: every swept one replaced by its chosen value."""
    parser = OverridesParser.create()
    return [
        parser.parse_override(f"{override.key_or_group}={_text(values[override.key_or_group])}")
        if override.is_sweep_override()
        else override
        for override in overrides
    ]


def _text(value: Value) -> str:
    return value if isinstance(value, str) else repr(value)


def _dimension(override: Override, config_loader: Any) -> Dimension | Problem:
    key, value = override.key_or_group, override.value()
    source = f"command line: {override.input_line}"
    if isinstance(value, (ChoiceSweep, Glob)):
        line = str(override.input_line)
        with_loader = OverridesParser.create(config_loader=config_loader).parse_override(line)
        choices = tuple(with_loader.sweep_string_iterator())
        if not choices:
            return Problem("nothing matches", key, source=source)
        return Dimension(key, choices)
    assert isinstance(value, (IntervalSweep, RangeSweep))
    is_log = "log" in value.tags
    if isinstance(value, IntervalSweep):
        low, high = float(value.start or 0), float(value.end or 0)
        is_int = isinstance(value.start, int) and isinstance(value.end, int)
        found = Dimension(key, low=low, high=high, step=1.0 if is_int else None, is_int=is_int, is_log=is_log)
    else:
        low, step = float(value.start or 0), float(value.step)
        is_int = all(isinstance(number, int) for number in (value.start, value.stop, value.step))
        count = -(-(float(value.stop or 0) - low) // step)  # the end is left out, as everywhere in Hydra's ranges
        found = Dimension(key, low=low, high=low + (count - 1) * step, step=step, is_int=is_int, is_log=is_log)
    if found.high < found.low:
        return Problem("there is nothing between these two", key, source=source, expected="a smaller number first")
    if is_log and found.low <= 0:
        return Problem("a logarithmic scale starts above 0", key, source=source)
    if is_log and found.step not in (None, 1.0):
        return Problem("a logarithmic scale has no steps", key, source=source, remedy=f"{key}=tag(log, interval(...))")
    return found
