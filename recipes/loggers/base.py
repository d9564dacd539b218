"""The interface of a logger."""

from __future__ import annotations

import abc
from collections.abc import Mapping

Value = float | int | None


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
