"""Which rank holds which embedding rows: integers only.

Every table is cut into W blocks of whole rows, ``ceil(rows / W)`` each (the last ones shorter or empty). Block b of
table t lies on rank ``(b + t) % W``: the turn from table to table spreads short tables and popular low ids over the
ranks. A rank keeps its blocks one after another, in the order of the tables; a row's place there is its *slot*.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """table_rows: rows of each table. world_size: number of ranks W. rank: this one's number."""

    table_rows: tuple[int, ...]
    world_size: int
    rank: int

    def block_rows(self, table: int) -> int:
        """Rows of a full block of ``table``."""
        return -(-self.table_rows[table] // self.world_size)

    def span(self, table: int, rank: int) -> tuple[int, int]:
        """Half-open range of the rows of ``table`` on ``rank``."""
        block, rows = (rank - table) % self.world_size, self.table_rows[table]
        size = self.block_rows(table)
        return min(block * size, rows), min((block + 1) * size, rows)

    def owner(self, table: int, row: int) -> int:
        return (row // self.block_rows(table) + table) % self.world_size

    def first_slots(self, rank: int) -> list[int]:
        """Slot of each table's first row on ``rank``; one more entry at the end: the number of slots."""
        slots = [0]
        for table in range(len(self.table_rows)):
            start, stop = self.span(table, rank)
            slots.append(slots[-1] + stop - start)
        return slots

    @cached_property
    def most_slots(self) -> int:
        """More than any slot of any rank."""
        return sum(self.block_rows(table) for table in range(len(self.table_rows)))

    @cached_property
    def num_slots(self) -> int:
        """Rows of all tables on this rank."""
        return self.first_slots(self.rank)[-1]
