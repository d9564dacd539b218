"""What happens to a step whose loss is not finite, or far above the recent ones.

Spike: with the losses of the last ``window`` good steps, m their median and d = 1.4826 * median(|loss - m|) (the
standard deviation, for normal noise), a loss above ``m + deviations * max(d, 0.01 * |m|)`` is one. Below a quarter of a
window nothing is judged. Losses of spikes do not enter the window, unless the policy is to go on with them.

================  ==================================================================================================
warn              told once for each row of bad steps, the update is made
skip              the update is left out on every rank, before the optimizer; ``max_skipped`` in a row end the run
stop              the run ends with a message; a spike must last ``steps`` steps for that
================  ==================================================================================================

Losses are sums over all ranks, the same bits on each, so all ranks judge alike without a word more. ``warn`` and
``stop`` look at the losses where they are read anyway, on log steps and before every checkpoint: nothing waits for the
device in between. ``skip`` must know before the optimizer: one more small sum and one read of the device in each step.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recipes.metrics.ledger import Line
from recipes.ranks import Ranks
from recipes.schema.training import LossSpikeConfig, TrainConfig
from recipes.step import Veto

_NORMAL = 1.4826  # standard deviation over median absolute deviation
_LEAST_SPREAD = 0.01  # of the median: a loss that hardly moves must not make a spike of every wiggle
_REMEDY_NOT_FINITE = (
    "try a lower optimizer.lr, a longer scheduler.warmup_steps, precision=bf16 or fp32, or train.on_bad_loss=skip"
)
_REMEDY_SPIKE = "try a lower optimizer.lr or train.clip_norm, or train.loss_spike.action=skip"


class LossError(RuntimeError):
    """The loss ran away and the config says to stop; the message is for people."""


@dataclass(frozen=True)
class Verdict:
    """policy: what the config says about this step; ``ok`` for a good one."""

    policy: str
    what: str = ""


class SpikeDetector:
    """Judges losses in the order of steps."""

    def __init__(self, config: LossSpikeConfig) -> None:
        self._config = config
        self._window: deque[float] = deque(maxlen=config.window)

    def limit(self) -> float | None:
        """The largest loss that is none; None while too few are known, or nobody asked."""
        if self._config.deviations is None or len(self._window) < max(2, self._config.window // 4):
            return None
        median = statistics.median(self._window)
        spread = _NORMAL * statistics.median(abs(loss - median) for loss in self._window)
        return median + self._config.deviations * max(spread, _LEAST_SPREAD * abs(median))

    def is_spike(self, loss: float) -> bool:
        limit = self.limit()
        is_spike = limit is not None and loss > limit
        if not is_spike or self._config.action == "warn":
            self._window.append(loss)
        return is_spike

    def state_dict(self) -> list[float]:
        return list(self._window)

    def load_state_dict(self, state: list[float]) -> None:
        self._window.clear()
        self._window.extend(state)


class LossGuard:
    """One rank's judge; every rank's says the same. Told of every step once, in order."""

    def __init__(self, train: TrainConfig, has_scaler: bool, ranks: Ranks, say: Callable[[str], None]) -> None:
        """has_scaler: gradients that overflowed are the scaler's business, it leaves such an update out by itself."""
        self._train, self._has_scaler, self._ranks, self._say = train, has_scaler, ranks, say
        self._spikes = SpikeDetector(train.loss_spike)
        self._num_bad_in_a_row = 0
        self._num_skipped_in_a_row = 0
        self._stop: str | None = None

    @property
    def decides_in_step(self) -> bool:
        """Whether the optimizer waits for a verdict; otherwise losses are judged when they are logged."""
        spikes_skip = self._train.loss_spike.deviations is not None and self._train.loss_spike.action == "skip"
        return self._train.on_bad_loss == "skip" or spikes_skip

    @property
    def must_stop(self) -> bool:
        return self._stop is not None

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON, the same on all ranks."""
        return {
            "spikes": self._spikes.state_dict(),
            "bad_in_a_row": self._num_bad_in_a_row,
            "skipped_in_a_row": self._num_skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._spikes.load_state_dict(state["spikes"])
        self._num_bad_in_a_row, self._num_skipped_in_a_row = state["bad_in_a_row"], state["skipped_in_a_row"]

    def veto(self, step: int) -> Veto | None:
        """What the step asks before its update; None where losses are judged later."""
        if not self.decides_in_step:
            return None

        def ask(loss_sum: Tensor, num_targets: Tensor, grad_norm: Tensor) -> bool:
            loss = self._ranks.sum(loss_sum.to(torch.float64, copy=True)) / num_targets.clamp(min=1)
            mean, norm = torch.stack([loss, grad_norm.double()]).tolist()  # the host waits for the device
            return self.must_skip(step, mean, norm)

        return ask

    def see(self, lines: Sequence[Line]) -> None:
        """Steps that have been logged, on every rank alike.

        Raises:
            LossError: the run must stop; the message names the step, the loss and what to try.
        """
        if not self.decides_in_step:
            for line in lines:
                self.judge(int(line["step"] or 0), float(line["loss"] or 0.0), float(line["grad_norm"] or 0.0))
        if self._stop is not None:
            raise LossError(self._stop)

    def must_skip(self, step: int, loss: float, grad_norm: float) -> bool:
        """Judge this step before its update; true: leave the update out. Stopping leaves it out too."""
        policy = self.judge(step, loss, grad_norm).policy
        if policy not in ("skip", "stop"):
            self._num_skipped_in_a_row = 0
            return False
        self._num_skipped_in_a_row += 1
        if self._num_skipped_in_a_row >= self._train.max_skipped and self._stop is None:
            self._stop = (
                f"{self._num_skipped_in_a_row} updates in a row were left out (train.max_skipped), the last at step "
                f"{step} with loss {loss:g}: the model does not recover by itself. Go on from an earlier checkpoint, "
                "with a lower optimizer.lr or other data"
            )
        return True

    def judge(self, step: int, loss: float, grad_norm: float) -> Verdict:
        """What the config says about the step; tells people, and remembers that the run must stop."""
        verdict = self._verdict(step, loss, grad_norm)
        if verdict.policy == "ok":
            self._num_bad_in_a_row = 0
            return verdict
        self._num_bad_in_a_row += 1
        if verdict.policy == "stop" and self._stop is None:
            self._stop = verdict.what
        elif verdict.policy == "skip":
            self._say(f"{verdict.what}: its update is left out")
        elif verdict.policy == "warn" and self._num_bad_in_a_row == 1:
            self._say(verdict.what)
        return verdict

    def _verdict(self, step: int, loss: float, grad_norm: float) -> Verdict:
        train, spike = self._train, self._train.loss_spike
        is_without_targets = math.isnan(loss) and grad_norm == 0  # a mean over nothing; a real NaN reaches the gradient
        if is_without_targets:
            return Verdict("ok")
        if not math.isfinite(loss):
            return Verdict(train.on_bad_loss, f"the loss of step {step} is {loss}; {_REMEDY_NOT_FINITE}")
        if not math.isfinite(grad_norm) and not self._has_scaler:
            what = f"the gradient of step {step} is not finite (its loss is {loss:g}); {_REMEDY_NOT_FINITE}"
            return Verdict(train.on_bad_loss, what)
        limit = self._spikes.limit()
        if not self._spikes.is_spike(loss):
            return Verdict("ok")
        lasting = self._num_bad_in_a_row + 1
        what = f"the loss of step {step} is {loss:.4g}, above {limit:.4g}, what the last steps make likely"
        if spike.action == "stop" and lasting < spike.steps:
            return Verdict("warn", what)
        row = f" for {lasting} steps now" if lasting > 1 else ""
        return Verdict(spike.action, f"{what}{row}; {_REMEDY_SPIKE}" if spike.action != "skip" else what)
