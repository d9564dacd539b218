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

    def state_dict(self) -> dict[str, float | int | None]:
        """JSON has no infinity: None until something counted."""
        reference = self._reference if math.isfinite(self._reference) else None
        return {"reference": reference, "lowest": self.lowest, "num_bad": self.num_bad}

    def load_state_dict(self, state: dict[str, float | int | None]) -> None:
        self._reference = math.inf if state["reference"] is None else float(state["reference"])
        self.lowest = state["lowest"]
        self.num_bad = int(state["num_bad"] or 0)

    @property
    def is_over(self) -> bool:
        """Whether to stop: ``patience`` evaluations in a row did not improve by more than ``min_delta``."""
        return self._config.patience is not None and self.num_bad >= self._config.patience

    def observe(self, loss: float) -> bool:
        """One more evaluation; whether to stop.

        Small gains add up: the comparison is with the last loss that counted. NaN never improves.
        """
        if math.isfinite(loss):
            self.lowest = loss if self.lowest is None else min(self.lowest, loss)
        if loss < self._reference - self._config.min_delta:
            self._reference, self.num_bad = loss, 0
        else:
            self.num_bad += 1
        return self.is_over
