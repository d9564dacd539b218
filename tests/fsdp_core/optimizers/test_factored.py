"""Row and column sums of a span of a matrix, for every span of small matrices."""

from __future__ import annotations

import pytest
import torch

from fsdp_core.numerics.optimizers.factored import (
    MatrixShape,
    add_square_sums,
    matrix_shape,
    outer_product,
    rectangles,
)

SHAPES = [(1, 1), (3, 4), (4, 1), (1, 5), (2, 3, 2), (2, 2, 2, 3)]


def spans(numel: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(numel + 1) for b in range(a, numel + 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rectangles_cover_each_element_once(shape: tuple[int, ...]) -> None:
    numel, columns = torch.Size(shape).numel(), shape[-1]
    for start, end in spans(numel):
        parts = list(rectangles(start, end, columns))
        assert len(parts) <= 3
        covered = [
            r * columns + c for p in parts for r in range(p.row, p.end_row) for c in range(p.column, p.end_column)
        ]
        assert covered == list(range(start, end))
        assert [p.offset for p in parts] == [sum(q.size for q in parts[:i]) for i in range(len(parts))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_all_shards_are_those_of_the_whole(shape: tuple[int, ...]) -> None:
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    geometry = matrix_shape(shape, grad.stride())
    assert geometry is not None
    flat = grad.reshape(-1)
    for num_shards in range(1, flat.numel() + 2):
        rows = torch.zeros(geometry.num_matrices * geometry.num_rows, dtype=torch.float64)
        columns = torch.zeros(geometry.num_matrices, geometry.num_columns, dtype=torch.float64)
        size = -(-flat.numel() // num_shards)
        for start in range(0, flat.numel(), size):
            add_square_sums(flat[start : start + size], start, geometry, rows, columns)
        torch.testing.assert_close(rows, grad.double().square().sum(-1).reshape(-1))
        torch.testing.assert_close(columns, grad.double().square().sum(-2).reshape(columns.shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outer_product_of_a_span(shape: tuple[int, ...]) -> None:
    rows, columns = torch.rand(*shape[:-1], 1), torch.rand(*shape[:-2], 1, shape[-1])
    geometry = matrix_shape(shape, torch.empty(shape).stride())
    assert geometry is not None
    whole = (rows @ columns).reshape(-1)
    for start, end in spans(whole.numel()):
        part = outer_product(start, end, geometry, rows.reshape(-1), columns.reshape(geometry.num_matrices, -1))
        torch.testing.assert_close(part, whole[start:end])


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((3, 4), (4, 1), MatrixShape(1, 3, 4, False)),
        ((3, 4), (1, 3), MatrixShape(1, 4, 3, True)),
        ((1, 4), (99, 1), MatrixShape(1, 1, 4, False)),
        ((5, 3, 4), (12, 4, 1), MatrixShape(5, 3, 4, False)),
        ((4, 3, 2, 2), (12, 1, 6, 3), None),
        ((7,), (1,), None),
        ((), (), None),
        ((0, 4), (4, 1), None),
    ],
)
def test_matrix_shape(shape: tuple[int, ...], stride: tuple[int, ...], expected: MatrixShape | None) -> None:
    assert matrix_shape(shape, stride) == expected
