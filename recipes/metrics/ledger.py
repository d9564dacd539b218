"""The ledger: what each step produced, kept on the device until somebody wants to read it.

Reading one number from a GPU makes the host wait for everything before it. So a step leaves its loss and
gradient norm as 0-dim device tensors here, and ``flush()`` (on log steps) turns all of them into one line a
step with one sum and one maximum over ranks and one read of the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.metrics.clock import StepTimes
from recipes.metrics.flops import SampleFlops, flop_rates
from recipes.metrics.memory import MemoryMeter
from recipes.ranks import Ranks

Line = dict[str, float | int | None]


@dataclass(frozen=True)
class StepOutcome:
    """What a step leaves on the device; nothing of it has made the host wait. 0-dim where not said otherwise.

    loss_sum: this rank's summed loss over its counted targets.
    num_targets: counted targets of the step over all ranks.
    grad_norm: of the engine's gradients before clipping, equal on all ranks.
    loss_scale: what the loss was multiplied by; None without a scaler.
    wishes: [n] of all ranks, summed (``recipes.boundary``).
    skipped: whether the update was left out, the same on all ranks; None where nobody decides that in the step.
    """

    loss_sum: Tensor
    num_targets: Tensor
    grad_norm: Tensor
    loss_scale: Tensor | None
    wishes: Tensor
    skipped: bool | None = None


@dataclass(frozen=True)
class StepRecord:
    """One finished step.

    step: optimizer steps done, this one included. lr: learning rate of its update.
    times: seconds by phase on this rank.
    """

    step: int
    lr: float
    times: StepTimes
    outcome: StepOutcome


@dataclass(frozen=True)
class StepShape:
    """What every step of the run has in common, over all ranks.

    samples, units: of one step; unit: what units are, ``tokens`` or ``samples``.
    is_queries: samples are also reported as queries per second.
    """

    samples: int
    units: int
    unit: str
    is_queries: bool


class Ledger:
    """Collects ``StepRecord``s of one rank; all ranks flush at the same steps."""

    def __init__(
        self,
        ranks: Ranks,
        memory: MemoryMeter,
        shape: StepShape,
        flops: SampleFlops | None,
        peak_flops: float | None,
        count_unreadable: Callable[[], int] | None = None,
    ) -> None:
        """count_unreadable: samples that this rank could not read so far; None where the first one ends the run."""
        self._ranks, self._memory, self._shape = ranks, memory, shape
        self._flops, self._peak_flops = flops, peak_flops
        self._count_unreadable, self._unreadable_before = count_unreadable, 0
        self._pending: list[StepRecord] = []
        self._samples_before = 0

    def begin_at(self, step: int, samples: int) -> None:
        """``step`` steps are done, with ``samples`` samples: not a multiple where the global batch was another."""
        self._samples_before = samples - step * self._shape.samples

    def add(self, record: StepRecord) -> None:
        self._pending.append(record)

    def flush(self) -> list[Line]:
        """One line per step since the last flush, equal on all ranks but for the times. Collective."""
        records, self._pending = self._pending, []
        if not records:
            return []
        numbers = self._read_device([record.outcome for record in records])
        memory = self._read_memory()
        lines = [self._line(record, *row) | memory for record, row in zip(records, numbers, strict=True)]
        if self._count_unreadable is not None:
            lines[-1]["unreadable_samples"] = self._new_unreadable(self._count_unreadable())
        return lines

    def _read_device(self, outcomes: list[StepOutcome]) -> list[tuple[float, float, float | None]]:
        """(global mean loss, gradient norm, loss scale) of each step: the one place where the host waits."""
        loss_sums = self._ranks.sum(self._stacked([outcome.loss_sum for outcome in outcomes]))
        losses = loss_sums / self._stacked([outcome.num_targets for outcome in outcomes])
        norms = self._stacked([outcome.grad_norm for outcome in outcomes])
        scales = self._stacked([outcome.loss_scale for outcome in outcomes])
        rows = torch.stack([losses, norms, scales], dim=1).tolist()
        return [
            (loss, norm, None if outcome.loss_scale is None else scale)
            for outcome, (loss, norm, scale) in zip(outcomes, rows, strict=True)
        ]

    def _new_unreadable(self, count: int) -> int:
        """Over all ranks, since the last flush."""
        new, self._unreadable_before = count - self._unreadable_before, count
        return int(self._ranks.sum(torch.tensor(new, dtype=torch.int64, device=self._ranks.device)))

    def _stacked(self, scalars: Sequence[Tensor | None]) -> Tensor:
        """float64 [n]; 0 where there is none."""
        device = self._ranks.device
        missing = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([missing if x is None else x.to(device, torch.float64) for x in scalars])

    def _read_memory(self) -> dict[str, int]:
        """The largest of all ranks, by name."""
        own = self._memory.read()
        values = torch.tensor(list(own.values()), dtype=torch.float64, device=self._ranks.device)
        return dict(zip(own, (int(value) for value in self._ranks.max(values).tolist()), strict=True))

    def _line(self, record: StepRecord, loss: float, grad_norm: float, loss_scale: float | None) -> Line:
        times, shape, world = record.times.read(), self._shape, self._ranks.world_size
        step_s = sum(times.values())
        samples_per_s = shape.samples / step_s
        samples = self._samples_before + record.step * shape.samples
        line: Line = {
            "step": record.step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": record.lr,
            "step_s": step_s,
            **{f"{phase}_s": seconds for phase, seconds in times.items()},
            "samples": samples,
            "samples_per_s": samples_per_s,
            "samples_per_s_per_rank": samples_per_s / world,
        }
        if shape.unit == "tokens":
            line["tokens"] = samples * (shape.units // shape.samples)
            line["tokens_per_s"] = shape.units / step_s
            line["tokens_per_s_per_rank"] = shape.units / step_s / world
        if shape.is_queries:
            line["qps"] = samples_per_s
            line["qps_per_rank"] = samples_per_s / world
        if loss_scale is not None:
            line["loss_scale"] = loss_scale
            line["overflowed"] = int(not math.isfinite(grad_norm))  # then the scaler has left the update out
        if record.outcome.skipped is not None:
            line["skipped"] = int(record.outcome.skipped)
        return line | flop_rates(self._flops, samples_per_s / world, self._peak_flops)
