"""Language modelling: decoder-only (next token) and encoder-decoder (span corruption)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from recipes.data.records import IGNORED_LABEL, Batch
from recipes.ranks import Ranks
from recipes.tasks.base import Evaluation, Task, finite_exp, logits_of


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [B, S, V], labels [B, S] (already the next token) -> summed cross-entropy in nats, float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


class CausalLM(Task):
    """batch: input_ids [B, S], labels [B, S]; model(input_ids) -> logits [B, S, V]."""

    throughput_unit = "tokens"

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return logits_of(model(batch["input_ids"]))

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        return token_loss_sum(logits, labels)

    def count_units(self, batch: Batch) -> int:
        return batch["input_ids"].numel()

    def evaluation(self) -> Evaluation:
        return TextEvaluation(self, self.info.bytes_per_token)


class Seq2SeqLM(Task):
    """batch: input_ids [B, S], labels [B, T]; model(input_ids=, labels=) -> object with logits [B, T, V]."""

    throughput_unit = "tokens"

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return logits_of(model(input_ids=batch["input_ids"], labels=batch["labels"]))

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        return token_loss_sum(logits, labels)

    def count_units(self, batch: Batch) -> int:
        return batch["input_ids"].numel() + batch["labels"].numel()

    def evaluation(self) -> Evaluation:
        # Targets are the masked spans and their sentinels, not the text: nats per byte would say nothing.
        return TextEvaluation(self, None)


class TextEvaluation(Evaluation):
    """loss (nats per target token), perplexity, and nats per byte where a token stands for known bytes."""

    def __init__(self, task: Task, bytes_per_token: float | None) -> None:
        super().__init__(task)
        self._bytes_per_token = bytes_per_token

    def result(self, ranks: Ranks) -> dict[str, float]:
        loss, _ = self.mean_loss(ranks)
        metrics = {"loss": loss, "perplexity": finite_exp(loss)}
        if self._bytes_per_token:
            metrics["nats_per_byte"] = loss / self._bytes_per_token
        return metrics
