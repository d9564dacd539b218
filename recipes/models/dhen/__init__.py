"""DHEN, a deep hierarchical ensemble network (arXiv 2203.11014): click prediction with very large embedding tables.

The layer types are the paper's; "PyTorch FSDP" gives only totals for its DHEN (550 million dense, 768 billion sparse
parameters), so the sizes of ``dhen_paper`` are our own proposal that meets them: 550,871,297 dense parameters
(8 units of 63,408,384 and a root of 43,604,225) and 600 tables of 10 million rows of 128.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from recipes.data.records import DataInfo
from recipes.models.dhen.adagrad import RowwiseAdagrad
from recipes.models.dhen.layers import DHENLayer, shares
from recipes.models.dhen.model import DHEN
from recipes.models.dhen.tables import EmbeddingTables
from recipes.models.sizes_from_data import exactly_as_data, table_rows
from recipes.schema.model import DHENConfig

__all__ = [
    "DHEN",
    "DHENLayer",
    "EmbeddingTables",
    "RowwiseAdagrad",
    "build",
    "extra_optimizers",
    "forward_flops",
    "ignored_modules",
    "unit_classes",
    "unit_forward_flops",
]


def build(config: DHENConfig, info: DataInfo) -> DHEN:
    """The tables' rows depend on ``torch.initial_seed()``, which must be the same on every rank at this moment.

    Raises ValueError if the sizes contradict each other or the data.
    """
    if not config.modules or len(config.modules) > config.num_tokens:
        raise ValueError(
            f"model.modules has {len(config.modules)} entries; it needs 1 to model.num_tokens ({config.num_tokens})"
        )
    num_dense = exactly_as_data("model.num_dense", config.num_dense, info.num_dense)
    return DHEN(config, num_dense, table_rows(config, info), seed=torch.initial_seed() % 2**63)


def unit_classes() -> tuple[type[nn.Module], ...]:
    return (DHENLayer,)


def ignored_modules(model: nn.Module) -> list[nn.Module]:
    """What the engine must leave alone: the tables, which are sharded already."""
    return [module for module in model.modules() if isinstance(module, EmbeddingTables)]


def extra_optimizers(model: nn.Module, config: DHENConfig) -> list[torch.optim.Optimizer]:
    """Row-wise Adagrad over this rank's rows; step and zero it together with the main optimizer."""
    tables = [module.weight for module in model.modules() if isinstance(module, EmbeddingTables)]
    return [RowwiseAdagrad(tables, lr=config.table_lr)]


def forward_flops(config: DHENConfig, info: DataInfo) -> float:
    """Two per weight and bias of each linear map, times d where it maps tokens, plus 2 m^2 d for the dot products.

    m ``num_tokens``, d ``embedding_dim``. Norms and element-wise products are not counted, lookups are no arithmetic.
    """
    num_dense = exactly_as_data("model.num_dense", config.num_dense, info.num_dense)
    m, d = config.num_tokens, config.embedding_dim
    num_features = len(table_rows(config, info)) + (1 if num_dense else 0)
    flops = 2 * num_features * m * d + _mlp_flops([m * d, *config.top_mlp, 1])
    if num_dense:
        flops += _mlp_flops([num_dense, *config.bottom_mlp, d])
    return unit_forward_flops(config, info) + flops


def unit_forward_flops(config: DHENConfig, info: DataInfo) -> float:
    """The layers' part of it: what activation checkpointing runs again."""
    m, d, flops = config.num_tokens, config.embedding_dim, 0
    for kind, tokens_out in zip(config.modules, shares(m, len(config.modules)), strict=True):
        if kind == "advanced_dlrm":
            layer = 2 * m * m * d + _mlp_flops([m * (m - 1) // 2, config.dlrm_hidden, tokens_out * d])
        else:
            layer = 2 * (2 * m * d * config.dcn_rank + m * d) + 2 * m * tokens_out * d
        flops += config.num_layers * layer
    return float(flops)


def _mlp_flops(widths: list[int]) -> int:
    return sum(2 * (a + 1) * b for a, b in pairwise(widths))
