"""Plain, slow optimizers for parameters that are not sharded; written from the formulas, parameter by parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ReferenceLAMB(torch.optim.Optimizer):
    def __init__(
        self, params: Any, lr: float, weight_decay: float = 0.01, max_trust_ratio: float | None = None
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "max_trust_ratio": max_trust_ratio})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._one(p, p.grad, group)

    def _one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * g
        v = state["v"] = 0.999 * state.get("v", torch.zeros_like(p)) + 0.001 * g * g
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + group["weight_decay"] * p
        ratio = (p.norm() / u.norm()).item() if p.norm() > 0 and u.norm() > 0 else 1.0
        if group["max_trust_ratio"] is not None:
            ratio = min(ratio, group["max_trust_ratio"])
        p -= group["lr"] * ratio * u


class NormalisedGradient(torch.optim.Optimizer):
    """update = -lr g / ||g|| per parameter: what a user's own shape-dependent optimizer may look like."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["count"] = self.state[p].get("count", 0) + 1
                    p.add_(p.grad / (p.grad.norm() + 1e-12), alpha=-group["lr"])
