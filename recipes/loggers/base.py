"""The interface of a logger."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass

Value = float | int | None


@dataclass(frozen=True)
class Start:
    """From where a run logs.

    steps_done: optimizer steps that are done and logged already.
    is_evaluation_done: the evaluation after the last of them, too, if there is one.
    """

    steps_done: int = 0
    is_evaluation_done: bool = True

    def has_line(self, line: Mapping[str, Value]) -> bool:
        """Whether this line of an earlier start still holds."""
        step = int(line["step"] or 0)
        if step == self.steps_done and not self.is_evaluation_done:
            return not any(name.startswith("eval_") for name in line)
        return step <= self.steps_done


FROM_THE_BEGINNING = Start()


class Logger(abc.ABC):
    """Gets every step's metrics in order of steps, on rank 0."""

    @abc.abstractmethod
    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Metrics of one step, or of the evaluation after it (names then start with ``eval_``)."""

    def flush(self) -> None:  # noqa: B027  # most loggers write by themselves
        """Called after each batch of ``log`` calls: what was logged should now survive a killed process."""

    @abc.abstractmethod
    def close(self, summary: Mapping[str, object] | None) -> None:
        """The run has ended; ``summary`` is None when it failed."""
