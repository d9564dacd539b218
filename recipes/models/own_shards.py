"""``OwnShards``: a module that spreads its parameters over the ranks by itself, and how checkpoints see it."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class TableShard:
    """This rank's part of one table, for checkpoints: enough to write it, and to read it at any number of ranks.

    name: unique in the module. shape: of the whole table. start, stop: half-open span of its rows here (may be empty).
    values: [stop - start, ...], a view: writing to it writes the table.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    values: Tensor


class OwnShards(nn.Module, abc.ABC):
    """Has one parameter, whose rows are those of its tables that lie here; every row lies on exactly one rank."""

    @abc.abstractmethod
    def shards(self) -> list[TableShard]:
        """This rank's part of each table, views of the parameters; the same tables on every rank."""

    @abc.abstractmethod
    def shards_like(self, per_row: Tensor) -> list[TableShard]:
        """The same for optimizer state with one entry per local row, [rows here, ...]."""
