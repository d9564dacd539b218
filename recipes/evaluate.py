"""One pass over held-out samples: the same ones at every evaluation, whatever the number of ranks."""

from __future__ import annotations

import torch
from torch import nn

from recipes.data.loading import EvalBatch, EvalBatches
from recipes.data.records import IGNORED_LABEL, Batch
from recipes.ranks import Ranks
from recipes.step import on_device
from recipes.tasks import Task


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, batches: EvalBatches, ranks: Ranks) -> dict[str, float]:
    """The task's metrics over the held-out samples of all ranks, the same on every rank. Collective.

    Every rank runs as many forwards as the others, the last ones perhaps on filling that is not counted. Leaves
    the model in training mode.
    """
    evaluation = task.evaluation()
    model.eval()
    try:
        for eval_batch in batches:
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
