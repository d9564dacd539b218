"""Stochastic gradient descent, with momentum."""

from __future__ import annotations

import torch

from recipes.schema.training import SGDConfig


def build(config: SGDConfig, groups: list[dict]) -> torch.optim.Optimizer:
    """Raises ValueError where Nesterov's variant is asked for without momentum (torch's own check)."""
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True)


def weight_decay_kind() -> str:
    return "l2"
