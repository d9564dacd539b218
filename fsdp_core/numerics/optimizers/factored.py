"""A factored second moment from a part of a matrix: sums over rows and columns of a 1-D span of elements.

A parameter [.., R, C] is B matrices of R rows and C columns, row-major; a span ``[start, end)`` of its elements is at
most three rectangles: the end of a row, whole rows, the beginning of a row. Everything here works on those views, so
nothing of the span's size is allocated for indices. Legend: B matrices, R rows, C columns, n = end - start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rectangle:
    """Elements ``[offset, offset + size)`` of a span: rows ``[row, end_row)`` counted through all matrices, of
    columns ``[column, end_column)``."""

    offset: int
    row: int
    end_row: int
    column: int
    end_column: int

    @property
    def size(self) -> int:
        return (self.end_row - self.row) * (self.end_column - self.column)

    def of(self, span: Tensor) -> Tensor:
        """The rectangle inside the 1-D span: [rows, columns], a view."""
        return span[self.offset : self.offset + self.size].view(self.end_row - self.row, -1)


def rectangles(start: int, end: int, num_columns: int) -> Iterator[Rectangle]:
    """Cut a span of elements of row-major rows of ``num_columns``."""
    position = start
    while position < end:
        row, column = divmod(position, num_columns)
        if column or end - position < num_columns:
            stop = min(end, (row + 1) * num_columns)
            rectangle = Rectangle(position - start, row, row + 1, column, column + stop - position)
        else:
            rectangle = Rectangle(position - start, row, row + (end - position) // num_columns, 0, num_columns)
        yield rectangle
        position += rectangle.size


@dataclass(frozen=True)
class MatrixShape:
    """B matrices of R rows and C columns. ``is_swapped``: memory holds the transposed matrix (2-D only), so what the
    logical parameter calls a row is a column here."""

    num_matrices: int
    num_rows: int
    num_columns: int
    is_swapped: bool

    @property
    def numel(self) -> int:
        return self.num_matrices * self.num_rows * self.num_columns


def matrix_shape(shape: Sequence[int], stride: Sequence[int]) -> MatrixShape | None:
    """How a parameter lies in memory as matrices of its last two dims; ``None`` for other permutations of dims
    (a channels-last convolution), and for parameters with fewer than two dims or no elements."""
    if len(shape) < 2 or 0 in shape:
        return None
    *outer, rows, columns = shape
    contiguous, step = [], 1
    for extent in reversed(shape):
        contiguous.append(step)
        step *= extent
    pairs = zip(shape, stride, reversed(contiguous), strict=True)
    if all(extent == 1 or actual == expected for extent, actual, expected in pairs):
        return MatrixShape(step // (rows * columns), rows, columns, is_swapped=False)
    if not outer and tuple(stride) == (1, rows):
        return MatrixShape(1, columns, rows, is_swapped=True)
    return None


def add_square_sums(span: Tensor, start: int, shape: MatrixShape, rows: Tensor, columns: Tensor) -> None:
    """Add the squares of a span that begins at element ``start`` into ``rows`` [B*R] and ``columns`` [B, C]."""
    for part in rectangles(start, start + span.numel(), shape.num_columns):
        squares = part.of(span).square()
        rows[part.row : part.end_row] += squares.sum(dim=1, dtype=rows.dtype)
        matrix = torch.arange(part.row, part.end_row, device=span.device) // shape.num_rows
        columns[:, part.column : part.end_column].index_add_(0, matrix, squares.to(columns.dtype))


def outer_product(start: int, end: int, shape: MatrixShape, rows: Tensor, columns: Tensor) -> Tensor:
    """``rows`` [B*R] times ``columns`` [B, C], for the elements ``[start, end)`` only: 1-D of n."""
    product = torch.empty(end - start, dtype=rows.dtype, device=rows.device)
    for part in rectangles(start, end, shape.num_columns):
        matrix = torch.arange(part.row, part.end_row, device=rows.device) // shape.num_rows
        of_columns = columns[:, part.column : part.end_column].index_select(0, matrix)
        torch.mul(of_columns, rows[part.row : part.end_row, None], out=part.of(product))
    return product
