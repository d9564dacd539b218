"""From positions to batches: the training loader with its prefetching thread, and the evaluation iterator.

The thread works ahead of the loop by at most ``depth`` steps and owns its own copy of the position. What the loop has
taken is counted separately, on the loop's side, so that a checkpoint never contains a step that was only prefetched.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from recipes.data.randomness import Permutation, key_of
from recipes.data.reading import SampleReader
from recipes.data.records import IGNORED_LABEL, Batch, Dataset
from recipes.data.stream import Sample, SampleStream, StreamState

_POLL_S = 0.1  # how often a waiting thread looks whether it should end


@dataclass(frozen=True)
class _Step:
    """One step of this rank. num_unreadable: samples of it that are filling."""

    micro_batches: list[Batch]
    num_unreadable: int


@dataclass(frozen=True)
class _Failure:
    """What the thread sends instead of a step when it cannot go on."""

    error: BaseException


class TrainBatches:
    """Iterates over steps; each is the list of this rank's micro-batches. Endless: epochs follow each other.

    Use it as a context manager, or call ``close``: the thread ends before the process does.
    """

    def __init__(
        self,
        dataset: Dataset,
        stream: SampleStream,
        *,
        rank: int,
        world_size: int,
        micro_batch: int,
        depth: int = 2,
        pin_memory: bool = False,
        on_error: str = "stop",
    ) -> None:
        """``stream``: where to start, and from then on where the loop is. ``depth``: steps prepared ahead.

        ``on_error``: what to do with a sample that cannot be read (``recipes.data.reading``).
        """
        self._reader = SampleReader(dataset, on_error)
        self._stream = stream
        self._share = (rank, world_size, micro_batch)
        self._depth = depth
        self._pin_memory = pin_memory
        self.num_unreadable = 0  # of this rank, in the steps that the loop took
        self._ready: queue.Queue[_Step | _Failure] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The next step's micro-batches. Raises what went wrong while reading them, DataError where it is known."""
        if self._thread is None:
            self._start()
        item = self._ready.get()
        if isinstance(item, _Failure):
            self.close()
            raise item.error
        self._stream.position += self._stream.global_batch
        self.num_unreadable += item.num_unreadable
        return item.micro_batches

    @property
    def num_taken(self) -> int:
        """Samples that the loop took since the run began, over all epochs and ranks."""
        return self._stream.position

    def state_dict(self) -> StreamState:
        """The position after the last step that the loop took."""
        return self._stream.state_dict()

    def load_state_dict(self, state: StreamState) -> None:
        """Continue at a saved position; what was prefetched for another one is dropped."""
        self.close()
        self._stream.load_state_dict(state)

    def close(self) -> None:
        """End the thread and drop what it prepared; iterating again starts anew at the loop's position."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        self._ready = queue.Queue(maxsize=self._depth)

    def __enter__(self) -> TrainBatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        ahead = SampleStream(self._stream.order.dataset_len, self._stream.order.seed, self._stream.global_batch)
        ahead.position = self._stream.position
        self._stop = threading.Event()
        # A daemon, so that a loop that dies without closing cannot keep the process alive.
        self._thread = threading.Thread(
            target=self._work, args=(ahead, self._ready, self._stop), name="data-prefetch", daemon=True
        )
        self._thread.start()

    def _work(self, ahead: SampleStream, ready: queue.Queue[_Step | _Failure], stop: threading.Event) -> None:
        while not stop.is_set():
            item: _Step | _Failure
            before = self._reader.num_unreadable
            try:
                micro_batches = [self._loaded(samples) for samples in ahead.take(*self._share)]
                item = _Step(micro_batches, self._reader.num_unreadable - before)
            except BaseException as error:  # handed to the loop, whatever it is: a thread has nobody else to tell
                item = _Failure(error)
            if not _put(ready, item, stop) or isinstance(item, _Failure):
                return

    def _loaded(self, samples: list[Sample]) -> Batch:
        batch = self._reader.batch(samples)
        if self._pin_memory:  # page-locked, so that the copy to the device can run beside the computation
            return {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch


def _put(ready: queue.Queue[_Step | _Failure], item: _Step | _Failure, stop: threading.Event) -> bool:
    """Wait for room; False if asked to end instead."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=_POLL_S)
            return True
        except queue.Full:
            continue
    return False


@dataclass(frozen=True)
class EvalBatch:
    """One forward of an evaluation on one rank.

    weights: [B] float32, 1 for a held-out sample, 0 for filling. Filling exists because every rank must run the same
    number of equally large forwards; its integer labels are already -100, so token losses need no weights.
    """

    batch: Batch
    weights: Tensor


class EvalBatches:
    """``eval_samples`` held-out samples, each on exactly one rank; the same ones at every evaluation of every run.

    They are the first of a fixed shuffled order: the first of the split's own order would be one long document.
    """

    def __init__(
        self,
        dataset: Dataset,
        eval_samples: int,
        *,
        rank: int,
        world_size: int,
        micro_batch: int,
        on_error: str = "stop",
    ) -> None:
        self._reader = SampleReader(dataset, on_error)
        self.num_samples = min(eval_samples, len(dataset))  # over all ranks
        self._order = Permutation(max(1, len(dataset)), key_of("evaluation"))
        self._rank, self._world_size, self._micro_batch = rank, world_size, micro_batch

    def __len__(self) -> int:
        """Forwards of one evaluation; the same on every rank."""
        return math.ceil(self.num_samples / (self._world_size * self._micro_batch))

    def __iter__(self) -> Iterator[EvalBatch]:
        for number in range(len(self)):
            first = (number * self._world_size + self._rank) * self._micro_batch
            count = max(0, min(self._micro_batch, self.num_samples - first))
            filling = [0] * (self._micro_batch - count)
            positions = np.array([*range(first, first + count), *filling])
            batch = dict(self._reader.batch([Sample(0, index) for index in self._order(positions).tolist()]))
            weights = torch.ones(self._micro_batch)
            if filling:
                weights[count:] = 0
                if not batch["labels"].is_floating_point():
                    batch["labels"] = batch["labels"].clone()
                    batch["labels"][count:] = IGNORED_LABEL
            yield EvalBatch(batch, weights)
