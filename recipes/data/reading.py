"""Reading the samples of a batch, and what to do with one that cannot be read.

With ``data.on_error=skip`` such a sample is filling: a copy of a readable one whose labels count for nothing. Ranks
need no word about it: the loss is a mean over counted targets, and those are summed over ranks anyway.
"""

from __future__ import annotations

import logging
from itertools import groupby

import torch

from recipes.data.errors import DataError
from recipes.data.records import IGNORED_LABEL, Batch, Dataset
from recipes.data.stream import Sample

MOST_IN_A_ROW = 100  # unreadable samples; more of them are no damaged files but a disk that is gone

_LOG = logging.getLogger(__name__)


def fetch(dataset: Dataset, samples: list[Sample]) -> Batch:
    """The batch of ``samples``, in order; a batch may reach from one epoch into the next.

    Raises:
        DataError: the dataset's own, or made of whatever else it raised.
    """
    try:
        runs = [
            dataset.batch([sample.index for sample in run], epoch)
            for epoch, run in groupby(samples, key=lambda sample: sample.epoch)
        ]
    except DataError:
        raise
    except Exception as error:
        first = samples[0]
        raise DataError(
            f"cannot read samples {[sample.index for sample in samples[:8]]} of epoch {first.epoch}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return joined(runs)


def joined(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


class SampleReader:
    """on_error: ``stop`` raises at the first unreadable sample; ``skip`` fills its place and counts it."""

    def __init__(self, dataset: Dataset, on_error: str = "stop") -> None:
        self._dataset, self._on_error = dataset, on_error
        self._readable: Batch | None = None  # one sample, the last that was read alone
        self._num_in_a_row = 0
        self.num_unreadable = 0

    def batch(self, samples: list[Sample]) -> Batch:
        """Raises DataError for what cannot be read, or no longer be filled."""
        try:
            batch = fetch(self._dataset, samples)
        except DataError:
            if self._on_error == "stop":
                raise
            return self._one_by_one(samples)
        self._num_in_a_row = 0
        return batch

    def _one_by_one(self, samples: list[Sample]) -> Batch:
        found: list[Batch | None] = []
        for sample in samples:
            try:
                found.append(fetch(self._dataset, [sample]))
                self._readable, self._num_in_a_row = found[-1], 0
            except DataError as error:
                found.append(None)
                self._count(sample, error)
        if self._readable is None:
            self._readable = self._any_readable(samples)
        filling = {**self._readable, "labels": torch.full_like(self._readable["labels"], IGNORED_LABEL)}
        return joined([filling if batch is None else batch for batch in found])

    def _count(self, sample: Sample, error: DataError) -> None:
        self.num_unreadable += 1
        self._num_in_a_row += 1
        if self._num_in_a_row >= MOST_IN_A_ROW:
            raise DataError(f"{MOST_IN_A_ROW} samples in a row cannot be read, the last one: {error}") from error
        _LOG.warning("sample %d of epoch %d is left out: %s", sample.index, sample.epoch, error)

    def _any_readable(self, samples: list[Sample]) -> Batch:
        """All of the first batch is damaged: any other sample shows what a sample looks like."""
        tried = {sample.index for sample in samples}
        for index in range(min(len(self._dataset), MOST_IN_A_ROW)):
            if index not in tried:
                try:
                    return fetch(self._dataset, [Sample(samples[0].epoch, index)])
                except DataError:
                    continue
        raise DataError(f"none of the first {MOST_IN_A_ROW} samples can be read")
