"""Where parameters lie: spans are half-open, cover everything once, and padding is at most F-1 elements."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_core.layout.boxes import boxes_of_run
from fsdp_core.layout.flat_layout import ParameterShape, build_layout, contiguous_stride, dense_stride

shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes=shapes, num_shards=st.integers(1, 7))
def test_every_element_has_one_place(shapes: list[tuple[int, ...]], num_shards: int) -> None:
    parameters = [ParameterShape(f"p{i}", shape, contiguous_stride(shape)) for i, shape in enumerate(shapes)]
    layout = build_layout(parameters, num_shards)
    assert layout.numel == sum(p.numel for p in parameters)
    assert 0 <= layout.padding_numel < num_shards
    assert layout.padded_numel == layout.shard_numel * num_shards
    position = 0
    for segment, parameter in zip(layout.segments, parameters, strict=True):
        assert (segment.start, segment.numel, segment.shape) == (position, parameter.numel, parameter.shape)
        position = segment.end
        pieces = [layout.local_span(segment, index) for index in range(num_shards)]
        covered = [element for piece in pieces for element in range(piece.start, piece.end)]
        assert covered == list(range(segment.numel))
        for index, piece in enumerate(pieces):
            assert piece.numel == piece.shard_end - piece.shard_start
            if piece.numel:
                start, _ = layout.shard_span(index)
                assert start + piece.shard_start == segment.start + piece.start


def test_shards_are_numbered_from_zero() -> None:
    layout = build_layout([ParameterShape("p", (6,), (1,))], 4)
    assert (layout.shard_numel, layout.padded_numel, layout.padding_numel) == (2, 8, 2)
    assert [layout.shard_span(index) for index in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert layout.local_span(layout.segments[0], 3).numel == 0
    with pytest.raises(IndexError):
        layout.shard_span(4)


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((2, 3), (3, 1), (3, 1)),
        ((2, 3), (1, 2), (1, 2)),
        ((2, 3, 4, 5), (60, 1, 15, 3), (60, 1, 15, 3)),
        ((2, 3), (6, 2), (3, 1)),
        ((2, 3), (0, 1), (3, 1)),
        ((1, 3), (7, 1), (7, 1)),
        ((0, 3), (1, 0), (3, 1)),
        ((), (), ()),
    ],
    ids=["contiguous", "transposed", "channels last", "gaps", "expanded", "size one", "empty", "scalar"],
)
def test_dense_strides_are_kept(shape: tuple[int, ...], stride: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert dense_stride(shape, stride) == expected


@given(
    shape=st.lists(st.integers(1, 4), max_size=4),
    order=st.randoms(use_true_random=False),
    cut=st.tuples(st.integers(0, 300), st.integers(0, 300)),
)
def test_boxes_cover_a_run_once(shape: list[int], order: random.Random, cut: tuple[int, int]) -> None:
    dims = list(range(len(shape)))
    order.shuffle(dims)
    stride, step = [0] * len(shape), 1
    for dim in reversed(dims):
        stride[dim] = step
        step *= shape[dim]
    start, end = min(cut[0], step), min(cut[1], step)
    boxes = boxes_of_run(shape, stride, start, end)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    covered = []
    for box in boxes:
        axes = [range(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)]
        covered += [sum(i * s for i, s in zip(place, stride, strict=True)) for place in itertools.product(*axes)]
        assert box.end - box.start == math.prod(box.sizes)
    assert sorted(covered) == list(range(start, max(end, start)))
