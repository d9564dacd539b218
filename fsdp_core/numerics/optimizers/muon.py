"""Muon on shards, with the result of ``torch.optim.Muon``: momentum, then the nearest orthogonal matrix.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the quintic Newton-Schulz
iteration in bfloat16 with torch's coefficients. Momentum is element-wise and stays on shards. The matrix itself has
to be whole: updates are gathered in bfloat16 (the iteration begins by rounding to it, so nothing is lost), each rank
orthogonalises the matrices it owns, and results go back in bfloat16. Bytes per step: two of each parameter's elements
out and two back, F times fewer than gathering everywhere and no matrix is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fsdp_core.errors import NumericsError
from fsdp_core.numerics.optimizers.base import BUCKET_BYTES, ShardedOptimizer
from fsdp_core.numerics.optimizers.geometry import Holding, Piece, in_buckets
from fsdp_core.numerics.optimizers.owners import (
    Owned,
    assign_owners,
    by_home,
    gather,
    local_part,
    scatter,
    write_window,
)

AdjustLr = Literal["original", "match_rms_adamw"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(ShardedOptimizer):
    """See the module's docstring. For matrices only; give the rest to AdamW (``parameter_groups`` splits by name).

    Args:
        params: parameters or groups of them; any kind that ``geometry`` lists, of matrices only.
        lr, weight_decay, momentum, nesterov: as in ``torch.optim.Muon``.
        ns_coefficients, ns_steps, eps: of the Newton-Schulz iteration.
        adjust_lr_fn: ``original`` scales the step by sqrt(max(1, rows/columns)), ``match_rms_adamw`` by
            0.2 sqrt(max(rows, columns)).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = _COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr | None = None,
    ) -> None:
        if lr < 0 or momentum < 0 or weight_decay < 0 or not 0 < ns_steps < 100:
            raise ValueError(
                f"Muon: lr={lr}, momentum={momentum}, weight_decay={weight_decay}, ns_steps={ns_steps} out of range"
            )
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"Muon: adjust_lr_fn must be 'original' or 'match_rms_adamw', got {adjust_lr_fn!r}")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)
        for holding in self._holdings.values():
            for piece in holding.pieces:
                if len(piece.shape) != 2:
                    raise NumericsError(
                        "Muon works on matrices only",
                        parameter=piece.fqn or None,
                        expected="a parameter with 2 dims",
                        got=f"shape {piece.shape}",
                        remedy="split with parameter_groups(params, rules) and give the rest to AdamW",
                    )

    def _step_group(self, group: dict[str, Any], holdings: Sequence[Holding]) -> None:
        work = {id(one.piece): one for one in assign_owners(holdings, _cost)}
        for bucket in in_buckets(holdings, BUCKET_BYTES):
            updates = {id(holding): self._momentum(group, holding) for holding in bucket}
            results: list[tuple[Holding, Tensor]] = []
            for home, members in by_home(bucket):
                parts = [(holding, updates[id(holding)]) for holding in members]
                full = gather(home, parts, torch.bfloat16)
                owned = [work[id(piece)] for holding in members for piece in holding.pieces]
                done = [(one.piece, _orthogonalised(one, full, group)) for one in owned if one.is_mine]
                shard = scatter(home, done, torch.bfloat16)
                results += [(h, local_part(h, shard)) for h in members]
            for holding in bucket:
                if holding.home is None:
                    one = work[id(holding.pieces[0])]
                    result = _orthogonalised(one, updates[id(holding)], group)
                    results.append((holding, holding.local(result)))
            write_window(holding.home.wire for holding in bucket if holding.home is not None)
            for holding, result in results:
                _apply(group, holding, result)

    def _momentum(self, group: dict[str, Any], holding: Holding) -> Tensor:
        """The update before orthogonalisation, 1-D like the local data."""
        state, grad = self.state[holding.param], holding.grad
        assert grad is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(holding.param)
        buffer = holding.local(state["momentum_buffer"])
        buffer.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


def _cost(piece: Piece) -> float:
    """Multiplications of one iteration, up to a factor: rows * columns * the smaller of both."""
    return float(math.prod(piece.shape) * min(piece.shape))


def _orthogonalised(one: Owned, flat: Tensor, group: dict[str, Any]) -> Tensor:
    return orthogonalise(one.piece.whole(flat), group["ns_coefficients"], group["ns_steps"], group["eps"])


def orthogonalise(update: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """The orthogonal factor of a matrix, roughly: X <- aX + (bA + cA^2)X with A = XX^T, in bfloat16."""
    a, b, c = coefficients
    x = update.to(torch.bfloat16)
    is_tall = x.size(0) > x.size(1)
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _apply(group: dict[str, Any], holding: Holding, result: Tensor) -> None:
    """result: the orthogonal matrices' elements that this rank holds, 1-D like the local data."""
    data = holding.data
    lr = float(group["lr"])
    data.mul_(1 - lr * group["weight_decay"])
    for piece in holding.pieces:
        rows, columns = piece.shape
        if group["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        else:
            ratio = math.sqrt(max(1.0, rows / columns)) if columns else 1.0
        piece.of(data).add_(piece.of(result), alpha=-lr * ratio)
