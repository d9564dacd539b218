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
from itertools import groupby
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from recipes.data.errors import DataError
from recipes.data.randomness import Permutation, key_of
from recipes.data.records import IGNORED_LABEL, Batch, Dataset
from recipes.data.stream import Sample, SampleStream, StreamState

_POLL_S = 0.1  # how often a waiting thread looks whether it should end


def fetch(dataset: Dataset, samples: list[Sample]) -> Batch:
    """The batch of ``samples``, in order; a batch may reach from one epoch into the next."""
    runs = [
        dataset.batch([sample.index for sample in run], epoch)
        for epoch, run in groupby(samples, key=lambda sample: sample.epoch)
    ]
    return runs[0] if len(runs) == 1 else {name: torch.cat([run[name] for run in runs]) for name in runs[0]}


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
    ) -> None:
        """``stream``: where to start, and from then on where the loop is. ``depth``: steps prepared ahead."""
        self._dataset = dataset
        self._stream = stream
        self._share = (rank, world_size, micro_batch)
        self._depth = depth
        self._pin_memory = pin_memory
        self._ready: queue.Queue[list[Batch] | _Failure] = queue.Queue(maxsize=depth)
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
        return item

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

    def _work(self, ahead: SampleStream, ready: queue.Queue[list[Batch] | _Failure], stop: threading.Event) -> None:
        while not stop.is_set():
            item: list[Batch] | _Failure
            try:
                item = [self._loaded(samples) for samples in ahead.take(*self._share)]
            except BaseException as error:  # handed to the loop, whatever it is: a thread has nobody else to tell
                item = _Failure(error)
            if not _put(ready, item, stop) or isinstance(item, _Failure):
                return

    def _loaded(self, samples: list[Sample]) -> Batch:
        try:
            batch = fetch(self._dataset, samples)
        except DataError:
            raise
        except Exception as error:
            first = samples[0]
            raise DataError(
                f"cannot read training samples {[sample.index for sample in samples[:8]]} of epoch {first.epoch}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if self._pin_memory:  # page-locked, so that the copy to the device can run beside the computation
            return {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch


def _put(ready: queue.Queue[list[Batch] | _Failure], item: list[Batch] | _Failure, stop: threading.Event) -> bool:
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

    def __init__(self, dataset: Dataset, eval_samples: int, *, rank: int, world_size: int, micro_batch: int) -> None:
        self._dataset = dataset
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
            batch = dict(self._dataset.batch(self._order(positions).tolist(), epoch=0))
            weights = torch.ones(self._micro_batch)
            if filling:
                weights[count:] = 0
                if not batch["labels"].is_floating_point():
                    batch["labels"] = batch["labels"].clone()
                    batch["labels"][count:] = IGNORED_LABEL
            yield EvalBatch(batch, weights)
