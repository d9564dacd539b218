"""The global order: the seed decides it, ranks divide it exactly, a position resumes it exactly."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.data.errors import DataError
from recipes.data.stream import GlobalOrder, Sample, SampleStream

SEEDS = st.integers(0, 2**31)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int]:
    """(world_size, micro_batch, global_batch)"""
    world_size, micro_batch = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    return world_size, micro_batch, world_size * micro_batch * draw(st.integers(1, 4))


@given(dataset_len=st.integers(1, 60), seed=SEEDS, num_epochs=st.integers(1, 3))
def test_every_epoch_has_every_sample_once(dataset_len: int, seed: int, num_epochs: int) -> None:
    samples = GlobalOrder(dataset_len, seed).samples(0, num_epochs * dataset_len)
    for epoch in range(num_epochs):
        part = samples[epoch * dataset_len : (epoch + 1) * dataset_len]
        assert {sample.epoch for sample in part} == {epoch}
        assert sorted(sample.index for sample in part) == list(range(dataset_len))


@given(dataset_len=st.integers(1, 60), seed=SEEDS, layout=layouts(), step=st.integers(0, 9))
def test_ranks_together_take_the_step_exactly(
    dataset_len: int, seed: int, layout: tuple[int, int, int], step: int
) -> None:
    world_size, micro_batch, global_batch = layout
    stream = SampleStream(dataset_len, seed, global_batch)
    per_rank = [stream.indices(step, rank, world_size, micro_batch) for rank in range(world_size)]
    assert {len(batch) for micro_batches in per_rank for batch in micro_batches} == {micro_batch}
    # Forward by forward, ranks side by side, is the global order itself: nothing else may depend on the layout.
    flat = [sample for forward in zip(*per_rank, strict=True) for batch in forward for sample in batch]
    assert flat == GlobalOrder(dataset_len, seed).samples(step * global_batch, (step + 1) * global_batch)


@given(dataset_len=st.integers(1, 60), seed=SEEDS, before=layouts(), after=layouts(), steps=st.integers(0, 6))
def test_resume_with_other_ranks_and_batches_loses_and_repeats_nothing(
    dataset_len: int, seed: int, before: tuple[int, int, int], after: tuple[int, int, int], steps: int
) -> None:
    first = SampleStream(dataset_len, seed, before[2])
    for _ in range(steps):
        first.take(0, before[0], before[1])
    state = json.loads(json.dumps(first.state_dict()))  # as a checkpoint keeps it

    second = SampleStream(dataset_len, seed, after[2])
    second.load_state_dict(state)
    taken = [second.take(0, 1, after[2])[0] for _ in range(2)]
    begin = steps * before[2]
    assert taken[0] + taken[1] == GlobalOrder(dataset_len, seed).samples(begin, begin + 2 * after[2])


def test_state_is_small_and_explicit() -> None:
    stream = SampleStream(dataset_len=10, seed=3, global_batch=4, fingerprint="abc")
    for _ in range(3):
        stream.take(0, 2, 1)
    assert stream.state_dict() == {"seed": 3, "dataset_len": 10, "fingerprint": "abc", "epoch": 1, "next_sample": 2}


def test_seeds_and_epochs_give_different_orders() -> None:
    order = GlobalOrder(1000, seed=0)
    epochs = [[sample.index for sample in order.samples(e * 1000, (e + 1) * 1000)] for e in range(2)]
    other = [sample.index for sample in GlobalOrder(1000, seed=1).samples(0, 1000)]
    assert epochs[0] != epochs[1] and epochs[0] != other


def test_order_does_not_change_between_versions() -> None:
    """A checkpoint's position means these samples; a change here breaks resuming."""
    assert GlobalOrder(10, seed=0).samples(8, 12) == [Sample(0, 8), Sample(0, 0), Sample(1, 0), Sample(1, 8)]


@pytest.mark.parametrize(
    ("change", "named"),
    [({"seed": 1}, "seed"), ({"dataset_len": 11}, "dataset_len"), ({"fingerprint": "b"}, "fingerprint")],
)
def test_a_position_in_other_data_is_refused(change: dict[str, object], named: str) -> None:
    ours = {"dataset_len": 10, "seed": 0, "fingerprint": "a"}
    state = SampleStream(**{**ours, **change}, global_batch=2).state_dict()  # type: ignore[arg-type]
    with pytest.raises(DataError, match=f"other data: {named} was"):
        SampleStream(**ours, global_batch=2).load_state_dict(state)  # type: ignore[arg-type]


def test_an_uneven_division_is_refused() -> None:
    with pytest.raises(DataError, match=r"global_batch=10 is no multiple.*2 \* 3 = 6"):
        SampleStream(100, 0, global_batch=10).take(0, 2, 3)


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(DataError, match="no samples"):
        GlobalOrder(0, seed=0)


def test_a_dataset_too_large_to_list_costs_nothing() -> None:
    samples = GlobalOrder(10**14, seed=0).samples(10**14 - 2, 10**14 + 2)
    assert [sample.epoch for sample in samples] == [0, 0, 1, 1]
    assert all(0 <= sample.index < 10**14 for sample in samples)
