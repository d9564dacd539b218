"""Adafactor on shards, with the result of ``torch.optim.Adafactor``.

Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (2018), with relative step
and update clipping as in torch. A parameter of two or more dims keeps one number per row and one per column instead of
one per element; both are sums over the sharding group. Two collectives a bucket: row and column sums with the
parameter's norm, then the norm of the update.

A parameter whose memory is no row-major stack of matrices (a channels-last convolution) is not factored in place:
refused by name when the optimizer is built, with the way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_core.errors import NumericsError
from fsdp_core.numerics.optimizers.base import BUCKET_BYTES, GroupSums, ShardedOptimizer, square_sums
from fsdp_core.numerics.optimizers.factored import MatrixShape, add_square_sums, matrix_shape, outer_product
from fsdp_core.numerics.optimizers.geometry import Holding, Piece, in_buckets


@dataclass(frozen=True, eq=False)
class _Moments:
    """Sums over all ranks. of_params: squares per piece; of_grads: row then column sums per piece, ``None`` where the
    piece is not factored."""

    of_params: Tensor
    of_grads: list[Tensor | None]


class Adafactor(ShardedOptimizer):
    """See the module's docstring.

    Args:
        params: parameters or groups of them; any kind that ``geometry`` lists.
        lr: upper limit of the relative step; the step is min(lr, 1/sqrt(t)) times the parameter's RMS.
        beta2_decay: the second moment forgets with 1 - t^beta2_decay.
        eps: (floor of the second moment; ``None`` is the dtype's epsilon, floor of the parameter's RMS).
        d: the update's RMS is clipped to this. weight_decay: decoupled.
    """

    whole_keys = frozenset({"row_var", "col_var"})
    part_keys = frozenset({"variance"})

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or beta2_decay > 0 or (eps[0] or 0) < 0 or eps[1] < 0 or d < 1 or weight_decay < 0:
            raise ValueError(
                f"Adafactor: lr={lr}, beta2_decay={beta2_decay}, eps={eps}, d={d}, weight_decay={weight_decay} "
                "out of range (lr, eps, weight_decay >= 0; beta2_decay <= 0; d >= 1)"
            )
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        for holding in self._holdings.values():
            for piece in holding.pieces:
                _shape_of(piece)

    def _step_group(self, group: dict[str, Any], holdings: Sequence[Holding]) -> None:
        for bucket in in_buckets(holdings, BUCKET_BYTES):
            for holding in bucket:
                self._prepare(holding)
            moments = self._square_sums(bucket)
            updates = [self._updates(group, holding, sums) for holding, sums in zip(bucket, moments, strict=True)]
            norms = GroupSums()
            for holding, (_, update) in zip(bucket, updates, strict=True):
                norms.add(holding, square_sums(update))
            for holding, (alphas, update), squares in zip(bucket, updates, norms.reduce(), strict=True):
                self._apply(group, holding, alphas, update, squares)

    def _prepare(self, holding: Holding) -> None:
        state = self.state[holding.param]
        if state:
            return
        data = holding.data
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["whole"], state["parts"] = {}, {}
        for piece in holding.pieces:
            shape = _shape_of(piece)
            if shape is None:
                state["parts"][piece.fqn] = {"variance": torch.zeros_like(piece.of(data))}
                continue
            row_var = data.new_zeros((*piece.shape[:-1], 1))
            col_var = data.new_zeros((*piece.shape[:-2], 1, piece.shape[-1]))
            state["whole"][piece.fqn] = {"row_var": row_var, "col_var": col_var}

    def _square_sums(self, bucket: Sequence[Holding]) -> list[_Moments]:
        """Over all ranks: squares of the gradient by row and column, squares of the parameter."""
        sums = GroupSums()
        tickets: list[tuple[int, list[int]]] = []
        for holding in bucket:
            data, grad = holding.data, holding.grad
            assert grad is not None
            of_params = sums.add(holding, square_sums([piece.of(data) for piece in holding.pieces]))
            of_grads = []
            for piece in holding.pieces:
                shape = _shape_of(piece)
                if shape is not None:
                    both = torch.zeros(
                        shape.num_matrices * (shape.num_rows + shape.num_columns),
                        dtype=torch.float64,
                        device=grad.device,
                    )
                    rows, columns = _split(both, shape)
                    add_square_sums(piece.of(grad), piece.start, shape, rows, columns)
                    of_grads.append(sums.add(holding, both))
                else:
                    of_grads.append(-1)
            tickets.append((of_params, of_grads))
        reduced = sums.reduce()
        return [
            _Moments(reduced[of_params], [reduced[t] if t >= 0 else None for t in of_grads])
            for of_params, of_grads in tickets
        ]

    def _updates(self, group: dict[str, Any], holding: Holding, moments: _Moments) -> tuple[list[float], list[Tensor]]:
        """Per piece: its step size, and the update before clipping (1-D, this rank's elements)."""
        state, data, grad = self.state[holding.param], holding.data, holding.grad
        assert grad is not None
        state["step"] += 1
        step = state["step"].item()
        weight = step ** group["beta2_decay"]
        eps1 = torch.finfo(data.dtype).eps if group["eps"][0] is None else group["eps"][0]
        relative = min(float(group["lr"]), step**-0.5)
        alphas, updates = [], []
        squares = moments.of_params.tolist()
        for piece, square, sums in zip(holding.pieces, squares, moments.of_grads, strict=True):
            alphas.append(max(group["eps"][1], (square / max(piece.numel, 1)) ** 0.5) * relative)
            own = piece.of(grad)
            if sums is None:
                variance = state["parts"][piece.fqn]["variance"]
                variance.lerp_(own * own, weight)
                estimate = variance.clone()
            else:
                estimate = _estimate(piece, state["whole"][piece.fqn], sums, weight, eps1)
            updates.append(estimate.clamp_(min=eps1 * eps1).rsqrt_().mul_(own))
        return alphas, updates

    def _apply(
        self,
        group: dict[str, Any],
        holding: Holding,
        alphas: Sequence[float],
        updates: Sequence[Tensor],
        squares: Tensor,
    ) -> None:
        data = holding.data
        if group["weight_decay"]:
            data.mul_(1 - float(group["lr"]) * group["weight_decay"])
        for piece, alpha, update, square in zip(holding.pieces, alphas, updates, squares.tolist(), strict=True):
            if update.numel():
                denominator = max(1.0, (square / piece.numel) ** 0.5 / group["d"])
                piece.of(data).add_(update, alpha=-alpha / denominator)


def _shape_of(piece: Piece) -> MatrixShape | None:
    """``None`` for pieces that are not factored."""
    shape = matrix_shape(piece.shape, piece.stride)
    if shape is None and len(piece.shape) > 1 and piece.numel:
        raise NumericsError(
            "Adafactor cannot factor a parameter whose memory is not row-major",
            parameter=piece.fqn or None,
            expected=f"contiguous strides for shape {piece.shape}",
            got=piece.stride,
            remedy="make the parameter contiguous before sharding, or use "
            "WholeParameterOptimizer(params, torch.optim.Adafactor)",
        )
    return shape


def _split(both: Tensor, shape: MatrixShape) -> tuple[Tensor, Tensor]:
    """Row sums [B*R] and column sums [B, C] in one tensor."""
    num_rows = shape.num_matrices * shape.num_rows
    return both[:num_rows], both[num_rows:].view(shape.num_matrices, shape.num_columns)


def _estimate(piece: Piece, state: dict[str, Tensor], sums: Tensor, weight: float, eps1: float) -> Tensor:
    """Move the factors on and multiply them out for this rank's elements."""
    shape = _shape_of(piece)
    assert shape is not None
    rows, columns = _split(sums, shape)
    row_sums, col_sums = (columns, rows) if shape.is_swapped else (rows, columns)
    row_var, col_var = state["row_var"], state["col_var"]
    row_var.lerp_((row_sums / piece.shape[-1]).view_as(row_var).to(row_var.dtype), weight)
    col_var.lerp_((col_sums / piece.shape[-2]).view_as(col_var).to(col_var.dtype), weight)
    normalised = row_var / row_var.mean(dim=-2, keepdim=True).clamp_(min=eps1)
    factors = (col_var, normalised) if shape.is_swapped else (normalised, col_var)
    by_row, by_column = factors[0].reshape(-1), factors[1].reshape(shape.num_matrices, shape.num_columns)
    return outer_product(piece.start, piece.end, shape, by_row, by_column)
