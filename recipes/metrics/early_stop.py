"""Stop when the held-out loss no longer improves."""

from __future__ import annotations

import math

from recipes.schema.training import EarlyStopConfig


class EarlyStop:
    """Fed with every evaluation's loss, which is the same on all ranks, so all decide the same."""

    def __init__(self, config: EarlyStopConfig) -> None:
        self._config = config
        self._reference = math.inf  # the last loss that counted as an improvement
        self.lowest: float | None = None
        self.num_bad = 0

    def observe(self, loss: float) -> bool:
        """Whether to stop: ``patience`` evaluations in a row did not improve by more than ``min_delta``.

        Small gains add up: the comparison is with the last loss that counted. NaN never improves.
        """
        if math.isfinite(loss):
            self.lowest = loss if self.lowest is None else min(self.lowest, loss)
        if loss < self._reference - self._config.min_delta:
            self._reference, self.num_bad = loss, 0
            return False
        self.num_bad += 1
        return self._config.patience is not None and self.num_bad >= self._config.patience
