"""The ranks of a run as a W/F x F table. Rows are sharding groups, columns are replication groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_core.errors import WrapError


@dataclass(frozen=True)
class RankTable:
    """``rows[i][j]`` is the global rank at row i (which copy) and column j (which shard)."""

    rows: tuple[tuple[int, ...], ...]

    @property
    def sharding_factor(self) -> int:
        return len(self.rows[0])

    @property
    def world_size(self) -> int:
        return len(self.rows) * len(self.rows[0])

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        return tuple(zip(*self.rows, strict=True))

    def shard_group(self, rank: int) -> tuple[int, ...]:
        """The row that holds global rank ``rank``."""
        return next(row for row in self.rows if rank in row)

    def replicate_group(self, rank: int) -> tuple[int, ...]:
        """The column that holds global rank ``rank``."""
        return next(column for column in self.columns if rank in column)


def build_rank_table(ranks: Sequence[int], sharding_factor: int | None) -> RankTable:
    """Cut ``ranks`` (in group order) into rows of F neighbours; ``None`` shards over all of them.

    Raises:
        WrapError: F is not a divisor of the number of ranks.
    """
    world_size = len(ranks)
    factor = world_size if sharding_factor is None else sharding_factor
    if not isinstance(factor, int) or factor < 1 or world_size % factor:
        raise WrapError(
            "The sharding factor must divide the number of ranks.",
            expected=f"one of {[f for f in range(1, world_size + 1) if world_size % f == 0]}",
            got=sharding_factor,
            remedy="choose sharding_factor=1 (replicate), the number of ranks (shard fully) or a divisor between",
        )
    return RankTable(tuple(tuple(ranks[i : i + factor]) for i in range(0, world_size, factor)))
