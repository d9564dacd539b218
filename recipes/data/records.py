"""What a data source gives: samples by index, facts for the model, and two disjoint splits."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

Batch = dict[str, Tensor]  # first dimension of every tensor: samples
IGNORED_LABEL = -100  # an integer label that counts for nothing, as torch's cross entropy has it


@dataclass(frozen=True)
class DataInfo:
    """Facts about the data that a model, a metric or a FLOP count needs. Fields of other tasks stay None.

    task: ``causal_lm``, ``seq2seq_lm``, ``clicks`` or ``images`` (what a batch looks like).
    vocab_size: tokens, sentinels and specials included.
    seq_len: tokens of one sample's input; target_len: of a seq2seq target.
    bytes_per_token: mean bytes of text one token stands for (1.0 for the byte tokenizer), for nats per byte.
    pad_id, eos_id: special tokens, if there are any.
    num_dense, table_rows: dense features; rows of each categorical feature.
    num_classes, image_size: labels; pixels on a side.
    num_train, num_eval: samples of one epoch.
    description: one line for people; the loop adds the numbers of samples.
    extras: ``fingerprint`` (str: equal for equal data; ranks and checkpoints compare it) and what a source adds.
    """

    task: str
    vocab_size: int | None = None
    seq_len: int | None = None
    target_len: int | None = None
    bytes_per_token: float | None = None
    pad_id: int | None = None
    eos_id: int | None = None
    num_dense: int | None = None
    table_rows: tuple[int, ...] | None = None
    num_classes: int | None = None
    image_size: int | None = None
    num_train: int = 0
    num_eval: int = 0
    description: str = ""
    extras: dict[str, object] = field(default_factory=dict)


class Dataset(abc.ABC):
    """Samples by index. The same index and epoch give the same bits on every rank and every run.

    Batches by task (B samples):
      causal_lm   input_ids [B, S] int64, labels [B, S] int64 (next token; -100 is not counted)
      seq2seq_lm  input_ids [B, S], labels [B, T] (-100 is not counted)
      clicks      dense [B, D] float32, sparse [B, tables] int64, labels [B] float32
      images      pixels [B, 3, H, H] float32, labels [B] int64
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Samples of one epoch."""

    @abc.abstractmethod
    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        """The samples at ``indices`` (each in [0, len)), in that order."""


@dataclass(frozen=True)
class PrepareRequest:
    """What the loop tells a data source.

    task: the model's task (a text source makes causal or span-corruption samples from it).
    seed: of masking and other randomness inside samples. What is held out never depends on it.
    seq_len: the model's longest sequence in tokens, or None; image_size likewise.
    is_main: this rank prepares the cache; the others wait in ``barrier()``.
    cache_dir: where prepared data may be kept; exists.
    report: progress line for people (rank 0 prints it).
    """

    task: str
    seed: int
    seq_len: int | None
    image_size: int | None
    is_main: bool
    barrier: Callable[[], None]
    cache_dir: Path
    report: Callable[[str], None]


@dataclass(frozen=True)
class Splits:
    """Two disjoint sets of samples and what is known about them."""

    train: Dataset
    eval: Dataset
    info: DataInfo
