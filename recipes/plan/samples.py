"""What the data of a config looks like, without reading it: facts for the model, and one batch of the right shapes."""

from __future__ import annotations

import torch

from recipes.data.records import Batch, DataInfo
from recipes.data.vocab import resolved_span_lengths
from recipes.registry import MODELS
from recipes.schema import RecipeConfig
from recipes.schema.data import TextDataConfig
from recipes.sizes import UnknownSize, expected_facts, longest_sequence

_CLASSES, _TABLE_ROWS, _NUM_TABLES, _NUM_DENSE = 1000, 1000, 8, 8


def expected_info(config: RecipeConfig) -> DataInfo:
    """Facts as the data would give them. Raises UnknownSize where only reading the data can tell."""
    task = MODELS[config.model.kind].task
    facts = expected_facts(config.model, config.data)
    target_len = target_length(config) if task == "seq2seq_lm" else None
    return DataInfo(
        task,
        vocab_size=facts.vocab_size,
        seq_len=facts.seq_len,
        target_len=target_len,
        bytes_per_token=1.0,
        num_dense=facts.num_dense,
        table_rows=facts.table_rows,
        num_classes=facts.num_classes,
        image_size=facts.image_size,
        num_train=config.train.global_batch,
    )


def target_length(config: RecipeConfig) -> int:
    """Tokens of a span corruption target."""
    if not isinstance(config.data, TextDataConfig):
        raise UnknownSize("a plugin's data: the lengths of its samples are known when it is read")
    return resolved_span_lengths(config.data, longest_sequence(config.model)).target_len


def sample_batch(info: DataInfo, num_samples: int) -> Batch:
    """Of the shapes of the task's batches (``recipes.data.records``); the values mean nothing. On the host."""
    shape = (num_samples, info.seq_len or 1)
    if info.task == "causal_lm":
        return {"input_ids": torch.zeros(shape, dtype=torch.int64), "labels": torch.zeros(shape, dtype=torch.int64)}
    if info.task == "seq2seq_lm":
        labels = torch.zeros(num_samples, info.target_len or 1, dtype=torch.int64)
        return {"input_ids": torch.zeros(shape, dtype=torch.int64), "labels": labels}
    if info.task == "images":
        side = info.image_size or 1
        return {
            "pixels": torch.zeros(num_samples, 3, side, side),
            "labels": torch.zeros(num_samples, dtype=torch.int64),
        }
    return {
        "dense": torch.zeros(num_samples, info.num_dense or 1),
        "sparse": torch.zeros(num_samples, len(info.table_rows or ()), dtype=torch.int64),
        "labels": torch.zeros(num_samples),
    }
