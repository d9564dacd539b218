"""Initial embedding rows as a pure function of (seed, table, row, column): the same bits for any number of ranks.

Each element hashes its own position (the finaliser of SplitMix64, in wrapping 64-bit integers) to a number in [0, 1);
nothing is drawn from torch's generators. The values are uniform in +-1/sqrt(rows of the table), as in DLRM
(arXiv 1906.00091).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recipes.models.dhen.placement import Placement

_MASK = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK_NUMEL = 1 << 20  # elements hashed at once: temporaries of 8 MiB


@torch.library.custom_op("recipes::fill_embedding_rows", mutates_args={"weight"})
def fill_embedding_rows(weight: Tensor, seed: int, table_rows: list[int], world_size: int, rank: int) -> None:
    """Fill ``weight`` [slots, dim] with the rows that ``Placement(table_rows, world_size, rank)`` puts on this rank.

    One operator, not a thousand: what records an initialisation to replay it later (deferred initialisation) sees a
    single call, which also knows nothing to draw and needs no generator.
    """
    placement = Placement(tuple(table_rows), world_size, rank)
    first_slots = placement.first_slots(rank)
    for table, rows in enumerate(table_rows):
        start, stop = placement.span(table, rank)
        block = weight[first_slots[table] : first_slots[table + 1]]
        _fill_block(block, _key(seed, table), start, stop, bound=1 / math.sqrt(rows))


@fill_embedding_rows.register_fake
def _(weight: Tensor, seed: int, table_rows: list[int], world_size: int, rank: int) -> None:
    """Nothing to compute where there is no memory."""


def _fill_block(block: Tensor, key: int, start: int, stop: int, bound: float) -> None:
    """Rows ``[start, stop)`` of one table into ``block`` [stop - start, dim]."""
    dim = block.shape[1]
    rows_at_once = max(1, _CHUNK_NUMEL // dim)
    columns = torch.arange(dim, device=block.device)
    for first in range(start, stop, rows_at_once):
        last = min(first + rows_at_once, stop)
        position = torch.arange(first, last, device=block.device)[:, None] * dim + columns
        block[first - start : last - start] = _uniform(position, key).mul_(2 * bound).sub_(bound)


def _uniform(position: Tensor, key: int) -> Tensor:
    """float32 in [0, 1) for each int64 position; overwrites ``position``."""
    x = position.mul_(_signed(_STEP)).add_(_signed(key))
    x ^= (x >> 30) & (2**34 - 1)  # the mask makes torch's arithmetic shift a logical one
    x *= _signed(_FIRST)
    x ^= (x >> 27) & (2**37 - 1)
    x *= _signed(_SECOND)
    return ((x >> 40) & (2**24 - 1)).to(torch.float32).mul_(2.0**-24)


def _key(seed: int, table: int) -> int:
    """Where a table's stream starts: the same hash over (seed, table), in Python's integers."""
    x = (seed * _STEP + (table + 1) * _FIRST) & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64 reads them."""
    return value - 2**64 if value >= 2**63 else value
