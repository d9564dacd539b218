"""LAMB (arXiv 1904.00962): norms of whole parameters, taken over the sharding group."""

from __future__ import annotations

import torch

from fsdp_core.optimizers import LAMB
from recipes.schema.training import LAMBConfig


def build(config: LAMBConfig, groups: list[dict]) -> torch.optim.Optimizer:
    beta1, beta2 = config.betas
    return LAMB(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, weight_decay=config.weight_decay)


def decays_by_group() -> bool:
    return True
