"""A run of elements of an n-dimensional tensor as rectangular boxes, which is how checkpoint formats describe parts.

A rank's part of a parameter is a run ``[start, end)`` in memory order. At most ``2 * ndim - 1`` boxes cover it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """``offsets`` and ``sizes`` along the tensor's dims; its elements are ``[start, end)`` in memory order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    end: int


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Dims from the slowest to the fastest in memory."""
    return tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim)))


def boxes_of_run(shape: Sequence[int], stride: Sequence[int], start: int, end: int) -> list[Box]:
    """Boxes that cover ``[start, end)`` of a dense tensor, in memory order and without overlap."""
    order = memory_order(shape, stride)
    found = []
    for offsets, sizes, first, last in _row_major([shape[dim] for dim in order], start, end):
        place = dict(zip(order, zip(offsets, sizes, strict=True), strict=True))
        dims = range(len(shape))
        found.append(Box(tuple(place[dim][0] for dim in dims), tuple(place[dim][1] for dim in dims), first, last))
    return found


_Plain = tuple[list[int], list[int], int, int]


def _row_major(shape: list[int], start: int, end: int) -> list[_Plain]:
    if start >= end:
        return []
    if not shape:
        return [([], [], start, end)]
    row = 1
    for size in shape[1:]:
        row *= size
    boxes: list[_Plain] = []
    first_full, last_full = -(-start // row), end // row
    if first_full > last_full:  # inside one row
        return _inside(shape, start // row, row, start, end)
    if start % row:
        boxes += _inside(shape, first_full - 1, row, start, first_full * row)
    if first_full < last_full:
        sizes = [last_full - first_full, *shape[1:]]
        boxes.append(([first_full] + [0] * (len(shape) - 1), sizes, first_full * row, last_full * row))
    if end % row:
        boxes += _inside(shape, last_full, row, last_full * row, end)
    return boxes


def _inside(shape: list[int], index: int, row: int, start: int, end: int) -> list[_Plain]:
    base = index * row
    return [
        ([index, *offsets], [1, *sizes], first + base, last + base)
        for offsets, sizes, first, last in _row_major(shape[1:], start - base, end - base)
    ]
