"""The prefetching loader and the evaluation iterator: ahead of the loop in time, never in what they say."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.data.errors import DataError
from recipes.data.loading import EvalBatches, TrainBatches
from recipes.data.reading import fetch
from recipes.data.records import IGNORED_LABEL, Batch, Dataset
from recipes.data.stream import Sample, SampleStream


class Numbers(Dataset):
    """Sample i of epoch e is the pair (e, i). ``fails_at``: the index that raises ``error``."""

    def __init__(self, length: int, fails_at: int | None = None, error: Exception | None = None) -> None:
        self._length, self._fails_at, self._error = length, fails_at, error
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        self.calls.append(list(indices))
        if self._error is not None and self._fails_at in indices:
            raise self._error
        assert all(0 <= index < self._length for index in indices)
        labels = torch.tensor([[epoch, index] for index in indices]).reshape(-1, 2)
        return {"labels": labels}


def loader(dataset: Dataset, global_batch: int = 4, **changes: int) -> TrainBatches:
    share = {"rank": 0, "world_size": 1, "micro_batch": 2, **changes}
    return TrainBatches(dataset, SampleStream(len(dataset), 0, global_batch), **share)  # type: ignore[arg-type]


def pairs(step: list[Batch]) -> list[list[int]]:
    return [pair for batch in step for pair in batch["labels"].tolist()]


def expected_pairs(stream: SampleStream, step: int, rank: int, world_size: int, micro_batch: int) -> list[list[int]]:
    return [
        [sample.epoch, sample.index]
        for batch in stream.indices(step, rank, world_size, micro_batch)
        for sample in batch
    ]


def test_a_batch_may_reach_into_the_next_epoch() -> None:
    batch = fetch(Numbers(5), [Sample(0, 3), Sample(0, 1), Sample(1, 4)])
    assert batch["labels"].tolist() == [[0, 3], [0, 1], [1, 4]]


@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("rank", [0, 1])
def test_prefetching_changes_no_order(rank: int, depth: int) -> None:
    stream = SampleStream(13, 0, 8)
    with loader(Numbers(13), 8, rank=rank, world_size=2, depth=depth) as batches:
        for step in range(6):
            assert pairs(next(batches)) == expected_pairs(stream, step, rank, 2, 2)


def test_the_state_is_what_the_loop_has_taken() -> None:
    dataset = Numbers(100)
    with loader(dataset, depth=5) as batches:
        for _ in range(2):
            next(batches)
        assert batches.state_dict()["next_sample"] == 8
    assert len(dataset.calls) > 2 * 2  # it did work ahead


def test_a_resumed_loader_continues_exactly() -> None:
    with loader(Numbers(11)) as batches:
        whole = [pairs(next(batches)) for _ in range(8)]
    with loader(Numbers(11)) as batches:
        for _ in range(3):
            next(batches)
        state = batches.state_dict()
    with loader(Numbers(11)) as batches:
        next(batches)  # its thread has prefetched what is no longer wanted
        batches.load_state_dict(state)
        assert [pairs(next(batches)) for _ in range(5)] == whole[3:]


def test_closing_and_going_on_repeats_and_skips_nothing() -> None:
    with loader(Numbers(50)) as batches:
        whole = [pairs(next(batches)) for _ in range(4)]
    with loader(Numbers(50)) as batches:
        halves = [pairs(next(batches)) for _ in range(2)]
        batches.close()
        assert halves + [pairs(next(batches)) for _ in range(2)] == whole


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "data-prefetch"]


def take(batches: TrainBatches, num_steps: int) -> None:
    for _ in range(num_steps):
        next(batches)


def failing_loop() -> None:
    with loader(Numbers(50)) as batches:
        next(batches)
        assert prefetch_threads()
        raise RuntimeError("the loop fails")


def test_no_thread_is_left() -> None:
    with pytest.raises(RuntimeError, match="the loop fails"):
        failing_loop()
    assert prefetch_threads() == []


def test_an_error_of_the_data_arrives_as_it_is() -> None:
    error = DataError("/corpus/a.txt:3: not UTF-8")
    with loader(Numbers(6, fails_at=3, error=error)) as batches, pytest.raises(DataError) as caught:
        take(batches, 3)
    assert caught.value is error
    assert prefetch_threads() == []


def test_any_other_error_names_the_samples() -> None:
    message = r"cannot read samples \[.*3.*\] of epoch 0: KeyError: 'pixels'"
    with (
        loader(Numbers(6, fails_at=3, error=KeyError("pixels"))) as batches,
        pytest.raises(DataError, match=message),
    ):
        take(batches, 3)


@given(length=st.integers(1, 40), wanted=st.integers(1, 50), world_size=st.integers(1, 5), micro=st.integers(1, 4))
def test_evaluation_covers_the_same_samples_for_any_ranks(
    length: int, wanted: int, world_size: int, micro: int
) -> None:
    whole = [list(EvalBatches(Numbers(length), wanted, rank=0, world_size=1, micro_batch=1))]
    parts = [
        list(EvalBatches(Numbers(length), wanted, rank=rank, world_size=world_size, micro_batch=micro))
        for rank in range(world_size)
    ]
    assert len({len(part) for part in parts}) == 1  # every rank runs as many forwards, of equal size
    assert {len(forward.weights) for part in parts for forward in part} == {micro}
    assert real_samples(parts) == real_samples(whole)
    assert len(real_samples(whole)) == min(length, wanted)


def real_samples(parts: list[list]) -> list[list[int]]:
    found = []
    for forward in [forward for part in parts for forward in part]:
        for row, weight in zip(forward.batch["labels"].tolist(), forward.weights.tolist(), strict=True):
            assert (row == [IGNORED_LABEL, IGNORED_LABEL]) == (weight == 0)
            if weight:
                found.append(row)
    assert len({tuple(row) for row in found}) == len(found)
    return sorted(found)


def test_evaluation_can_be_repeated() -> None:
    batches = EvalBatches(Numbers(10), 7, rank=0, world_size=2, micro_batch=2)
    first, second = ([forward.batch["labels"].tolist() for forward in batches] for _ in range(2))
    assert first == second


def test_no_evaluation_without_samples() -> None:
    assert len(EvalBatches(Numbers(10), 0, rank=0, world_size=2, micro_batch=2)) == 0
    assert list(EvalBatches(Numbers(0), 5, rank=0, world_size=2, micro_batch=2)) == []
