"""Image classification."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.data.records import IGNORED_LABEL, Batch
from recipes.ranks import Ranks
from recipes.tasks.base import Evaluation, Task, logits_of


class Images(Task):
    """batch: pixels [B, 3, H, H], labels [B]; model(pixels) -> logits [B, C]."""

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return logits_of(model(batch["pixels"]))

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED_LABEL, reduction="sum")

    def evaluation(self) -> Evaluation:
        return ImagesEvaluation(self)


class ImagesEvaluation(Evaluation):
    """loss and accuracy (part of the samples whose largest logit is the label's)."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._correct: Tensor | None = None

    def add(self, logits: Tensor, batch: Batch, num_targets: int) -> None:
        super().add(logits, batch, num_targets)
        correct = (logits.argmax(dim=-1) == batch["labels"]).sum()  # an ignored label equals no class
        self._correct = correct if self._correct is None else self._correct + correct

    def result(self, ranks: Ranks) -> dict[str, float]:
        loss, number = self.mean_loss(ranks)
        own = self._correct if self._correct is not None else torch.zeros((), dtype=torch.int64)
        correct = float(ranks.sum(own.to(ranks.device, torch.float64)))
        return {"loss": loss, "accuracy": correct / number if number else float("nan")}
