"""Click prediction: binary labels, one logit a sample."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.data.records import IGNORED_LABEL, Batch
from recipes.ranks import Ranks
from recipes.tasks.base import Evaluation, Task, logits_of


class Clicks(Task):
    """batch: dense [B, D], sparse [B, tables], labels [B] in {0, 1}; model(dense, sparse) -> logits [B]."""

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return logits_of(model(batch["dense"], batch["sparse"]))

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Binary log-loss in nats. A product with the mask, not indexing: no device answers the host."""
        counted = (labels != IGNORED_LABEL).float()
        losses = F.binary_cross_entropy_with_logits(logits.float(), labels.float() * counted, reduction="none")
        return (losses * counted).sum()

    def evaluation(self) -> Evaluation:
        return ClicksEvaluation(self)


class ClicksEvaluation(Evaluation):
    """loss (log-loss), normalised entropy, AUC. Exact: every score is gathered, 8 bytes a sample and rank."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._scores: list[Tensor] = []
        self._labels: list[Tensor] = []

    def add(self, logits: Tensor, batch: Batch, num_targets: int) -> None:
        super().add(logits, batch, num_targets)
        self._scores.append(logits.detach().float())
        self._labels.append(batch["labels"].float())

    def result(self, ranks: Ranks) -> dict[str, float]:
        loss, number = self.mean_loss(ranks)
        scores, labels = ranks.gather(torch.cat(self._scores)), ranks.gather(torch.cat(self._labels))
        counted = labels != IGNORED_LABEL
        scores, labels = scores[counted].cpu(), labels[counted].cpu()
        positives = float(labels.sum())
        return {
            "loss": loss,
            "normalised_entropy": normalised_entropy(loss, positives / number if number else math.nan),
            "auc": area_under_roc(scores, labels),
        }


def normalised_entropy(log_loss: float, base_rate: float) -> float:
    """Log-loss over that of always predicting the base rate (below 1 is better than knowing nothing else).

    NaN where all labels are equal.
    """
    if not 0.0 < base_rate < 1.0:
        return math.nan
    entropy = -(base_rate * math.log(base_rate) + (1.0 - base_rate) * math.log1p(-base_rate))
    return log_loss / entropy


def area_under_roc(scores: Tensor, labels: Tensor) -> float:
    """scores [n], labels [n] in {0, 1} -> probability that a positive outranks a negative, a tie counting half.

    From the rank sum of the positives (Mann-Whitney), equal scores sharing their mean rank. NaN where all
    labels are equal or a score is not a number.
    """
    positives = int((labels > 0.5).sum())
    negatives = labels.numel() - positives
    if positives == 0 or negatives == 0 or bool(scores.isnan().any()):
        return math.nan
    _, group, sizes = torch.unique(scores, sorted=True, return_inverse=True, return_counts=True)
    last_rank = sizes.cumsum(0).double()  # ranks start at 1; a group of equal scores ends at this one
    mean_rank = last_rank - (sizes.double() - 1.0) / 2.0
    rank_sum = float(mean_rank[group][labels > 0.5].sum())
    return (rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives)
