"""The global sample order and its division over ranks: integers only.

Order: position p of the run's endless sequence is sample ``permutation(seed, epoch)[p mod n]`` of epoch ``p div n``.
It depends on the seed and on the number of samples n, on nothing else: not on ranks, batch sizes or restarts.
Step: the next ``global_batch`` positions. Micro-batch a of rank r is the run of ``micro_batch`` positions that starts
``(a * world_size + r) * micro_batch`` into the step, so all ranks together take exactly the step's positions.
State: epoch and next sample (with seed and n to recognise another order). Batch size and ranks may change on resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from recipes.data.errors import DataError
from recipes.data.randomness import Permutation, key_of


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of one epoch: the same index in another epoch may be masked or flipped differently."""

    epoch: int
    index: int


class StreamState(TypedDict):
    """Where a run is in its data. ``next_sample`` counts positions inside ``epoch``, in shuffled order."""

    seed: int
    dataset_len: int
    fingerprint: str
    epoch: int
    next_sample: int


class GlobalOrder:
    """The endless shuffled sequence of a dataset's samples. O(1) memory at any length."""

    def __init__(self, dataset_len: int, seed: int) -> None:
        if dataset_len < 1:
            raise DataError("the training split has no samples; give more data or a smaller data.eval_fraction")
        self.dataset_len = dataset_len
        self.seed = seed
        self._permutations: dict[int, Permutation] = {}  # of the epochs in use, at most two

    def samples(self, first: int, last: int) -> list[Sample]:
        """The samples at positions [first, last)."""
        found: list[Sample] = []
        while first < last:
            epoch, offset = divmod(first, self.dataset_len)
            count = min(last - first, self.dataset_len - offset)
            indices = self._permutation(epoch)(np.arange(offset, offset + count))
            found.extend(Sample(epoch, index) for index in indices.tolist())
            first += count
        return found

    def _permutation(self, epoch: int) -> Permutation:
        if epoch not in self._permutations:
            if len(self._permutations) >= 2:
                del self._permutations[next(iter(self._permutations))]
            self._permutations[epoch] = Permutation(self.dataset_len, key_of("order", self.seed, epoch))
        return self._permutations[epoch]


class SampleStream:
    """A run's position in the global order, moved forward one step at a time."""

    def __init__(self, dataset_len: int, seed: int, global_batch: int, fingerprint: str = "") -> None:
        """``fingerprint``: of the data's content (``DataInfo.extras``); resuming on other data is then an error."""
        self.order = GlobalOrder(dataset_len, seed)
        self.global_batch = global_batch
        self.fingerprint = fingerprint
        self.position = 0  # samples handed out since the run began, over all epochs

    def indices(self, step: int, rank: int, world_size: int, micro_batch: int) -> list[list[Sample]]:
        """This rank's micro-batches of step ``step``, counted from the start of the run at this global batch."""
        return self._divided(step * self.global_batch, rank, world_size, micro_batch)

    def take(self, rank: int, world_size: int, micro_batch: int) -> list[list[Sample]]:
        """This rank's micro-batches of the next step; moves on. Every rank must take every step."""
        micro_batches = self._divided(self.position, rank, world_size, micro_batch)
        self.position += self.global_batch
        return micro_batches

    def _divided(self, first: int, rank: int, world_size: int, micro_batch: int) -> list[list[Sample]]:
        per_forward = world_size * micro_batch
        if self.global_batch % per_forward:
            raise DataError(
                f"train.global_batch={self.global_batch} is no multiple of world_size * train.micro_batch "
                f"({world_size} * {micro_batch} = {per_forward})"
            )
        starts = range(first + rank * micro_batch, first + self.global_batch, per_forward)
        return [self.order.samples(start, start + micro_batch) for start in starts]

    def state_dict(self) -> StreamState:
        epoch, next_sample = divmod(self.position, self.order.dataset_len)
        return StreamState(
            seed=self.order.seed,
            dataset_len=self.order.dataset_len,
            fingerprint=self.fingerprint,
            epoch=epoch,
            next_sample=next_sample,
        )

    def load_state_dict(self, state: StreamState) -> None:
        """Continue at a saved position.

        Raises DataError if seed, number of samples or content differ: the position would mean other samples.
        """
        expected = {"seed": self.order.seed, "dataset_len": self.order.dataset_len, "fingerprint": self.fingerprint}
        for name, ours in expected.items():
            theirs = state[name]  # type: ignore[literal-required]
            if theirs != ours:
                raise DataError(
                    f"the checkpoint's position belongs to other data: {name} was {theirs!r}, is now {ours!r}. "
                    "Continue with the same data, tokenizer, seq_len and seed, or start a new run"
                )
        self.position = state["epoch"] * self.order.dataset_len + state["next_sample"]
