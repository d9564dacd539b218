"""AdamW (arXiv 1711.05101)."""

from __future__ import annotations

import torch

from recipes.schema.training import AdamWConfig


def build(config: AdamWConfig, groups: list[dict]) -> torch.optim.Optimizer:
    """Fused, on flat shards the update is one pass over memory; else every operation is one over all shards.

    Weight decay comes from ``groups.attach_decay``.
    """
    kernels = {"fused": True} if config.fused else {"foreach": True}
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, weight_decay=0.0, **kernels
    )


def weight_decay_kind() -> str:
    return "decoupled"
