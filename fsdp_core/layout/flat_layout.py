"""Where each original parameter lies in a unit's flat parameter. Integers only.

All spans are half-open. A flat parameter of ``numel`` elements is padded to ``padded_numel``, the next multiple
of F, and cut into F equal shards of ``shard_numel`` elements; the padding (at most F-1 elements) is at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterShape:
    """What the layout has to know about one original parameter."""

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # the stride seen inside forward; dense in memory

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Segment:
    """One original parameter inside the flat parameter: elements ``[start, end)``, in memory order."""

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class LocalSpan:
    """The part of one segment that one rank holds.

    ``[shard_start, shard_end)`` counts inside the rank's shard, ``[start, end)`` inside the segment itself.
    Both are empty (start == end) when the rank holds nothing of it.
    """

    shard_start: int
    shard_end: int
    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class FlatLayout:
    """The segments of one flat parameter and its cut into F shards."""

    segments: tuple[Segment, ...]
    numel: int
    num_shards: int

    @property
    def shard_numel(self) -> int:
        return -(-self.numel // self.num_shards)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.num_shards

    @property
    def padding_numel(self) -> int:
        return self.padded_numel - self.numel

    def shard_span(self, shard_index: int) -> tuple[int, int]:
        """``[start, end)`` of one shard inside the padded flat parameter."""
        if not 0 <= shard_index < self.num_shards:
            raise IndexError(f"shard index {shard_index} outside [0, {self.num_shards})")
        return shard_index * self.shard_numel, (shard_index + 1) * self.shard_numel

    def local_span(self, segment: Segment, shard_index: int) -> LocalSpan:
        """What shard ``shard_index`` holds of ``segment``."""
        shard_start, shard_end = self.shard_span(shard_index)
        start, end = max(segment.start, shard_start), min(segment.end, shard_end)
        if start >= end:
            return LocalSpan(0, 0, 0, 0)
        return LocalSpan(start - shard_start, end - shard_start, start - segment.start, end - segment.start)


def build_layout(parameters: Sequence[ParameterShape], num_shards: int) -> FlatLayout:
    """Concatenate ``parameters`` in the given order for ``num_shards`` (F) ranks."""
    segments, start = [], 0
    for parameter in parameters:
        end = start + parameter.numel
        segments.append(Segment(parameter.fqn, parameter.shape, parameter.stride, start, end))
        start = end
    return FlatLayout(tuple(segments), start, num_shards)


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """``stride`` if it covers memory without gaps or overlaps (any permutation of dims), else the contiguous one."""
    expected = 1
    for size, step in sorted(
        ((size, step) for size, step in zip(shape, stride, strict=True) if size > 1), key=lambda pair: pair[1]
    ):
        if step != expected:
            return contiguous_stride(shape)
        expected *= size
    return tuple(stride) if all(size > 0 for size in shape) else contiguous_stride(shape)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
