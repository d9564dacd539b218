"""Adafactor (arXiv 1804.04235): row and column means of whole parameters, taken over the sharding group."""

from __future__ import annotations

import torch

from fsdp_core.optimizers import Adafactor
from recipes.schema.training import AdafactorConfig


def build(config: AdafactorConfig, groups: list[dict]) -> torch.optim.Optimizer:
    return Adafactor(groups, lr=config.lr, beta2_decay=config.beta2_decay, weight_decay=config.weight_decay)


def decays_by_group() -> bool:
    return True
