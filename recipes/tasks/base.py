"""What every task offers. Shapes: B samples, S input tokens, T target tokens, V vocabulary, C classes.

Losses are *sums* over counted targets, in float32 whatever the model computes in. The step divides by the
number of targets of the whole step, over all micro-batches and ranks: a mean of means would weigh a target
by how many neighbours its micro-batch happens to have.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor, nn

from recipes.data.records import IGNORED_LABEL, Batch, DataInfo
from recipes.ranks import Ranks


class Task(abc.ABC):
    """One kind of training sample.

    throughput_unit: what speed counts, ``tokens`` or ``samples``.
    """

    throughput_unit: str = "samples"

    def __init__(self, info: DataInfo) -> None:
        self.info = info

    @abc.abstractmethod
    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """One forward; the shape is the task's own."""

    @abc.abstractmethod
    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Sum of the loss over counted targets, a float32 scalar that can be differentiated."""

    @abc.abstractmethod
    def evaluation(self) -> Evaluation:
        """A fresh accumulator for one pass over held-out samples."""

    def count_targets(self, batch: Batch) -> int:
        """Counted targets of a batch. Call it while the batch is on the host: no device is asked."""
        return int((batch["labels"] != IGNORED_LABEL).sum())

    def count_units(self, batch: Batch) -> int:
        """Tokens or samples of a batch, for speed; padding included."""
        return batch["labels"].shape[0]


class Evaluation(abc.ABC):
    """Accumulates one evaluation on this rank, then reduces over all ranks. Sums are kept in float64."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._loss_sum: Tensor | None = None
        self._num_targets = 0

    def add(self, logits: Tensor, batch: Batch, num_targets: int) -> None:
        """One batch; labels may hold ``IGNORED_LABEL``. ``num_targets`` as counted on the host."""
        loss_sum = self.task.loss_sum(logits, batch["labels"]).double()
        self._loss_sum = loss_sum if self._loss_sum is None else self._loss_sum + loss_sum
        self._num_targets += num_targets

    def mean_loss(self, ranks: Ranks) -> tuple[float, int]:
        """(mean loss over all counted targets of all ranks, their number). NaN without any target."""
        loss_sum = self._loss_sum if self._loss_sum is not None else torch.zeros((), dtype=torch.float64)
        count = torch.tensor(float(self._num_targets), dtype=torch.float64, device=ranks.device)
        total, number = ranks.sum(torch.stack([loss_sum.to(ranks.device), count])).tolist()
        return (total / number if number else float("nan")), int(number)

    @abc.abstractmethod
    def result(self, ranks: Ranks) -> dict[str, float]:
        """The metrics, the same on every rank; ``loss`` is always among them. Collective."""


def logits_of(output: object) -> Tensor:
    """Models return their logits, or an object that holds them (as ``transformers`` does)."""
    return output if isinstance(output, Tensor) else output.logits  # type: ignore[attr-defined]


def finite_exp(value: float) -> float:
    """exp(value), inf where a float cannot hold it."""
    return float(torch.tensor(value, dtype=torch.float64).exp())
