"""Learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from collections.abc import Callable

from recipes.schema.training import SchedulerConfig

Schedule = Callable[[int], float]


def schedule(config: SchedulerConfig, peak_lr: float, steps: int) -> Schedule:
    """``lr(step)`` for ``step`` in [0, steps): the rate of the update that ends step number ``step``.

    Warm-up (``warmup_steps``, or a twentieth of ``steps`` where that is null) rises linearly and reaches the peak at
    its last step, ``warmup_steps - 1`` (never starting at 0,
    which would waste a step). The shape then falls from the peak to ``min_lr_ratio * peak`` at the last step.
    """
    floor = peak_lr * config.min_lr_ratio
    warmup = steps // 20 if config.warmup_steps is None else config.warmup_steps

    def lr(step: int) -> float:
        if step < warmup:
            return peak_lr * (step + 1) / warmup
        if config.kind == "constant":
            return peak_lr
        # 0 at the first step after warm-up (at the peak's own step where there is a warm-up), 1 at the last.
        start = warmup - 1 if warmup else 0
        progress = min(1.0, (step - start) / max(1, steps - 1 - start))
        if config.kind == "linear":
            return peak_lr + (floor - peak_lr) * progress
        if config.kind == "cosine":
            return floor + (peak_lr - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
        raise ValueError(f"scheduler.kind must be cosine, linear or constant, got {config.kind!r}")

    return lr
