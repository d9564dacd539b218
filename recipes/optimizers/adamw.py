"""AdamW (arXiv 1711.05101)."""

from __future__ import annotations

import torch

from recipes.schema.training import AdamWConfig


def build(config: AdamWConfig, groups: list[dict]) -> torch.optim.Optimizer:
    """Fused: on flat shards the update is one pass over memory. Weight decay comes from ``groups.attach_decay``."""
    beta1, beta2 = config.betas
    return torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, weight_decay=0.0, fused=True)


def weight_decay_kind() -> str:
    return "decoupled"
