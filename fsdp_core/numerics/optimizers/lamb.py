"""LAMB on shards: Adam's update, scaled per original parameter by ||parameter|| / ||update||.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (ICLR 2020), algorithm 2,
with phi(x) = x and Adam's bias correction. The two norms are sums over the sharding group, one collective a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_core.numerics.optimizers.base import BUCKET_BYTES, GroupSums, ShardedOptimizer, square_sums
from fsdp_core.numerics.optimizers.geometry import Holding, in_buckets


class LAMB(ShardedOptimizer):
    """See the module's docstring.

    Args:
        params: parameters or groups of them; any kind that ``geometry`` lists.
        lr: step size. betas, eps: Adam's. weight_decay: added to the update before its norm is taken.
        max_trust_ratio: upper limit of ||parameter|| / ||update||; ``None`` has none.

    A parameter or an update of norm zero takes the plain step (ratio 1).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        max_trust_ratio: float | None = None,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"LAMB: lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay} out of range")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_trust_ratio": max_trust_ratio,
        }
        super().__init__(params, defaults)

    def _step_group(self, group: dict[str, Any], holdings: Sequence[Holding]) -> None:
        for bucket in in_buckets(holdings, BUCKET_BYTES):
            updates = [self._update(group, holding) for holding in bucket]
            sums = GroupSums()
            for holding, update in zip(bucket, updates, strict=True):
                data = holding.data
                of_data = square_sums([piece.of(data) for piece in holding.pieces])
                of_update = square_sums([piece.of(update) for piece in holding.pieces])
                sums.add(holding, torch.stack([of_data, of_update]))
            for holding, update, squares in zip(bucket, updates, sums.reduce(), strict=True):
                self._apply(group, holding, update, squares)

    def _update(self, group: dict[str, Any], holding: Holding) -> Tensor:
        """Adam's direction plus decay, 1-D like the local data."""
        state, param, grad = self.state[holding.param], holding.data, holding.grad
        assert grad is not None
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(holding.param)
            state["exp_avg_sq"] = torch.zeros_like(holding.param)
        state["step"] += 1
        step = state["step"].item()
        beta1, beta2 = group["betas"]
        mean, square = holding.local(state["exp_avg"]), holding.local(state["exp_avg_sq"])
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = (mean / (1 - beta1**step)).div_(denominator)
        return update.add_(param, alpha=group["weight_decay"])

    def _apply(self, group: dict[str, Any], holding: Holding, update: Tensor, squares: Tensor) -> None:
        """squares: [2, number of pieces], of parameter and update."""
        norms = squares.sqrt()
        ratios = torch.where((norms > 0).all(dim=0), norms[0] / norms[1], torch.ones_like(norms[0]))
        if group["max_trust_ratio"] is not None:
            ratios.clamp_(max=group["max_trust_ratio"])
        data = holding.data
        filled = [
            (piece, ratio) for piece, ratio in zip(holding.pieces, ratios, strict=True) if piece.end > piece.start
        ]
        if not filled:
            return
        scaled = [piece.of(update) for piece, _ in filled]
        torch._foreach_mul_(scaled, [ratio.to(update.dtype) for _, ratio in filled])
        torch._foreach_add_([piece.of(data) for piece, _ in filled], scaled, alpha=-float(group["lr"]))
