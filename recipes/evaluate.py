"""One pass over held-out samples: the same ones at every evaluation, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from recipes.data.loading import EvalBatch, EvalBatches
from recipes.data.records import IGNORED_LABEL, Batch
from recipes.ranks import Ranks
from recipes.step import on_device
from recipes.tasks import Task


class CutShort(Exception):
    """An evaluation was ended before its last forward, on every rank alike. It has no result."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    batches: EvalBatches,
    ranks: Ranks,
    is_over: Callable[[int], bool] = lambda forwards: False,
) -> dict[str, float]:
    """The task's metrics over the held-out samples of all ranks, the same on every rank. Collective.

    Every rank runs as many forwards as the others, the last ones perhaps on filling that is not counted. Leaves
    the model in training mode.

    is_over: asked between forwards with their number so far; the same answer on every rank.

    Raises:
        CutShort: ``is_over`` said so.
    """
    evaluation = task.evaluation()
    model.eval()
    try:
        for forwards, eval_batch in enumerate(batches):
            if forwards > 0 and is_over(forwards):
                raise CutShort
            host_batch = without_filling(eval_batch)
            num_targets = task.count_targets(host_batch)
            for batch in on_device([host_batch], ranks.device):
                evaluation.add(task.logits(model, batch), batch, num_targets)
    finally:
        model.train()
    return evaluation.result(ranks)


def without_filling(eval_batch: EvalBatch) -> Batch:
    """The batch with every label of a filling sample ignored, whatever the labels' dtype."""
    if bool((eval_batch.weights > 0).all()):
        return eval_batch.batch
    labels = eval_batch.batch["labels"].clone()
    labels[eval_batch.weights == 0] = IGNORED_LABEL
    return eval_batch.batch | {"labels": labels}
