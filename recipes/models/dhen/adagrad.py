"""Row-wise Adagrad: one accumulator per row, only the rows a step touched are read or written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class RowwiseAdagrad(torch.optim.Optimizer):
    """For parameters [rows, dim] with sparse gradients.

    For each touched row: ``sum += mean(g^2)``, ``row -= lr * g / (sqrt(sum) + eps)``, computed in float32 and rounded
    once to the row's dtype. State of a parameter: ``sum`` [rows] float32. Rows without a gradient do not move, so
    there is no weight decay.

    A gradient with repeated rows is summed first, so that micro-batches and ranks count as one batch. With a gradient
    scaler, unscale before ``step`` as for any optimizer; ``grad`` is an ordinary sparse tensor.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    def accumulator(self, param: nn.Parameter) -> Tensor:
        """``sum`` of ``param``, zeros before the first step."""
        state = self.state[param]
        if "sum" not in state:
            state["sum"] = torch.zeros(param.shape[0], dtype=torch.float32, device=param.device)
        return state["sum"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    _update(param, self.accumulator(param), param.grad, group["lr"], group["eps"])
        return loss


def _update(param: Tensor, accumulator: Tensor, grad: Tensor, lr: float, eps: float) -> None:
    if not grad.is_sparse:
        raise TypeError("row-wise Adagrad wants sparse gradients; this parameter has a dense one")
    if not grad.is_meta:  # on paper (a plan) every row is touched once, the most there can be
        grad = grad.coalesce()
    rows, g = grad._indices()[0], grad._values().float()  # [touched], [touched, dim]
    total = accumulator[rows] + g.square().mean(dim=1)
    accumulator[rows] = total
    scale = lr / (total.sqrt() + eps)
    param[rows] = (param[rows].float() - scale[:, None] * g).to(param.dtype)
