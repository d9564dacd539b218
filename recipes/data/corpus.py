"""A corpus: text documents in a fixed order, whichever files they come from. numpy only, no torch.

A plugin that brings text of its own derives from ``Corpus`` and hands it to ``recipes.data.text.prepare_text``.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recipes.data.errors import DataError
from recipes.data.files import Key
from recipes.data.randomness import key_of, random_bits

_MEANINGFUL_REST = 0.1  # of the held-out bytes; less than this missing is not worth cutting a document


@dataclass(frozen=True)
class Document:
    """text: may be empty, then it is skipped but keeps its number. where: file (and line) for messages."""

    text: str
    where: str


class Corpus(abc.ABC):
    """Documents in the same order every time they are asked for."""

    name: str = "text"  # for people

    @abc.abstractmethod
    def identity(self) -> Key:
        """JSON values that change when the text may have changed (names, sizes and times of files)."""

    @abc.abstractmethod
    def documents(self) -> Iterator[Document]:
        """All documents. Raises DataError naming the file (and line) that cannot be read."""

    def lengths(self, max_bytes: int | None) -> NDArray[np.int64]:
        """UTF-8 bytes of each document, in order; stops where ``max_bytes`` is reached."""
        found: list[int] = []
        total = 0
        for document in self.documents():
            found.append(len(as_bytes(document.text)))
            total += found[-1]
            if max_bytes is not None and total >= max_bytes:
                break
        return limited_lengths(np.array(found, dtype=np.int64), max_bytes)


class RandomAccessCorpus(Corpus):
    """A corpus whose documents can be read in any order, cheaply: what streaming needs."""

    @abc.abstractmethod
    def document_bytes(self, number: int, first: int, last: int) -> bytes:
        """Bytes [first, last) of document ``number`` in UTF-8."""


def as_bytes(text: str) -> bytes:
    """UTF-8; a lone surrogate (JSON can spell one) becomes a question mark."""
    return text.encode("utf-8", errors="replace")


def limited_lengths(lengths: NDArray[np.int64], max_bytes: int | None) -> NDArray[np.int64]:
    """``lengths`` cut off where their sum reaches ``max_bytes``; the last document may be shortened."""
    if max_bytes is None or lengths.sum() <= max_bytes:
        return lengths
    ends = lengths.cumsum()
    count = int(np.searchsorted(ends, max_bytes)) + 1
    kept = lengths[:count].copy()
    kept[-1] -= ends[count - 1] - max_bytes
    return kept


@dataclass(frozen=True)
class Pieces:
    """One split of a corpus: bytes [firsts[i], lasts[i]) of document numbers[i], for i in order. Never empty pieces."""

    numbers: NDArray[np.int64]
    firsts: NDArray[np.int64]
    lasts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def num_bytes(self) -> int:
        return int((self.lasts - self.firsts).sum())


@dataclass(frozen=True)
class TextSplits:
    """Disjoint pieces for training and for evaluation; together they are the whole corpus."""

    train: Pieces
    eval: Pieces


def split_documents(lengths: NDArray[np.int64], eval_fraction: float, where: str) -> TextSplits:
    """Hold out about ``eval_fraction`` of the bytes: whole documents, and the end of one more where those do not fit.

    The choice depends on the lengths alone: not on the run's seed (runs with different seeds are evaluated on the same
    text) and not on the tokenizer (so is nats per byte).
    """
    total = int(lengths.sum())
    if total == 0:
        raise DataError(f"{where} holds no text: all of its {len(lengths)} documents are empty")
    goal = round(total * eval_fraction)
    held_out, cut_number, cut_bytes = _chosen(lengths, goal)

    numbers = np.arange(len(lengths), dtype=np.int64)
    train_lasts = np.where(held_out, 0, lengths)
    eval_firsts = np.where(held_out, 0, lengths)
    if cut_bytes:
        train_lasts[cut_number] -= cut_bytes
        eval_firsts[cut_number] -= cut_bytes
    return TextSplits(_nonempty(numbers, np.zeros_like(lengths), train_lasts), _nonempty(numbers, eval_firsts, lengths))


def _chosen(lengths: NDArray[np.int64], goal: int) -> tuple[NDArray[np.bool_], int, int]:
    """Which documents are held out whole, and how many bytes of the end of which further one."""
    held_out = np.zeros(len(lengths), dtype=bool)
    if goal == 0:
        return held_out, 0, 0
    order = np.argsort(random_bits(key_of("held out"), np.arange(len(lengths), dtype=np.uint64)), kind="stable")
    ends = lengths[order].cumsum()
    count = int(np.searchsorted(ends, goal, side="right"))  # documents whose sum stays within the goal
    held_out[order[:count]] = True
    missing = goal - (int(ends[count - 1]) if count else 0)
    if count == len(lengths) or missing <= goal * _MEANINGFUL_REST:
        return held_out, 0, 0
    return held_out, int(order[count]), missing


def _nonempty(numbers: NDArray[np.int64], firsts: NDArray[np.int64], lasts: NDArray[np.int64]) -> Pieces:
    kept = lasts > firsts
    return Pieces(numbers[kept], firsts[kept], lasts[kept])
