"""``synthetic_clicks``: NOT real data. Clicks drawn from a planted model, so that learning is visible.

Sample i follows from i alone: dense features are normal, categories are skewed (few values are frequent), and the
label is drawn with the probability that a hidden model gives: an effect of every dense feature and of every category
value, and a product of the effects of neighbouring tables, which only a model with interactions can learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.data.clicks import require_clicks
from recipes.data.randomness import as_uniform, key_of, random_bits, random_table
from recipes.data.records import Batch, DataInfo, Dataset, PrepareRequest, Splits
from recipes.schema.data import SyntheticClicksConfig

_SKEW = 6.0  # value = rows * u ** skew: of 1,000 values the most frequent one has a third of the samples
_STRENGTH = {"dense": 1.0, "single": 1.5, "pair": 1.0}  # standard deviations of the parts of the logit
_TABLE_DECAY = 0.7  # each table matters this much less than the one before
_BIAS = -1.2  # about a third of the labels are 1


def prepare(config: SyntheticClicksConfig, request: PrepareRequest) -> Splits:
    require_clicks(config.kind, request)
    num_eval = max(1, round(config.num_samples * config.eval_fraction)) if config.eval_fraction > 0 else 0
    train = PlantedClicks(config, first=0, last=config.num_samples)
    held_out = PlantedClicks(config, first=config.num_samples, last=config.num_samples + num_eval)
    info = DataInfo(
        task="clicks",
        num_dense=config.num_dense,
        table_rows=(config.rows_per_table,) * config.num_tables,
        num_train=len(train),
        num_eval=len(held_out),
        description=f"SYNTHETIC clicks with a planted structure, "
        f"{config.num_dense} dense features and {config.num_tables} tables of {config.rows_per_table:,} rows",
        extras={
            "fingerprint": f"synthetic-{config.num_samples}-{config.num_dense}-{config.num_tables}-"
            f"{config.rows_per_table}",
            "synthetic": True,
        },
    )
    return Splits(train, held_out, info)


class PlantedClicks(Dataset):
    """Samples [first, last) of the endless planted sequence."""

    def __init__(self, config: SyntheticClicksConfig, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._num_dense, self._num_tables = config.num_dense, config.num_tables
        self._rows_per_table = config.rows_per_table
        effects = _normal(key_of("dense effects"), np.zeros(1, dtype=np.uint64), config.num_dense)[0]
        self._dense_weights = _unit(effects)
        self._table_weights = _unit(_TABLE_DECAY ** np.arange(config.num_tables))
        self._pair_weights = _unit(_TABLE_DECAY ** np.arange(config.num_tables - 1))

    def __len__(self) -> int:
        return self._last - self._first

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        dense, sparse, probability = self.drawn(indices)
        numbers = np.asarray(indices, dtype=np.uint64) + np.uint64(self._first)
        is_click = as_uniform(random_bits(key_of("label"), numbers)) < probability
        return {
            "dense": torch.from_numpy(dense.astype(np.float32)),
            "sparse": torch.from_numpy(sparse),
            "labels": torch.from_numpy(is_click.astype(np.float32)),
        }

    def drawn(self, indices: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
        """dense [B, D], sparse [B, tables], and the planted probability of a click [B]: nobody can predict better."""
        numbers = np.asarray(indices, dtype=np.uint64) + np.uint64(self._first)
        dense = _normal(key_of("dense"), numbers, self._num_dense)
        skewed = as_uniform(random_table(key_of("sparse"), numbers, self._num_tables)) ** _SKEW
        sparse = (skewed * self._rows_per_table).astype(np.int64)
        effects = self._value_effects(sparse)
        pairs = effects[:, 1:] * effects[:, :-1]
        logit = (
            _BIAS
            + _STRENGTH["dense"] * (dense @ self._dense_weights)
            + _STRENGTH["single"] * (effects @ self._table_weights)
            + _STRENGTH["pair"] * (pairs @ self._pair_weights)
        )
        return dense, sparse, 1 / (1 + np.exp(-logit))

    def _value_effects(self, sparse: NDArray[np.int64]) -> NDArray[np.float64]:
        """[B, tables]: the effect of each value, a fixed draw from a uniform distribution of variance 1."""
        tables = random_bits(key_of("value effects"), np.arange(self._num_tables, dtype=np.uint64))
        return (as_uniform(random_bits(tables, sparse.astype(np.uint64))) - 0.5) * 12**0.5


def _unit(vector: NDArray[Any]) -> NDArray[np.float64]:
    """Scaled to length 1; an empty one stays empty."""
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def _normal(key: int, rows: NDArray[np.uint64], columns: int) -> NDArray[np.float64]:
    """[len(rows), columns] normal numbers (Box and Muller)."""
    radius = np.sqrt(-2 * np.log1p(-as_uniform(random_table(key_of("radius", key), rows, columns))))
    return radius * np.cos(2 * np.pi * as_uniform(random_table(key_of("angle", key), rows, columns)))
