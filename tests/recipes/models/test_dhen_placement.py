"""Where rows lie, and what they start as: the same table for any number of ranks. No processes: a rank is a number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from recipes.models.dhen.placement import Placement
from recipes.models.dhen.tables import EmbeddingTables

ROWS = (10, 3, 101, 1, 7, 16)
WORLDS = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_row_lies_on_the_one_rank_that_owner_names(world_size: int) -> None:
    placement = Placement(ROWS, world_size, 0)
    for table, rows in enumerate(ROWS):
        held = [row for rank in range(world_size) for row in range(*placement.span(table, rank))]
        assert sorted(held) == list(range(rows))
        for rank in range(world_size):
            assert all(placement.owner(table, row) == rank for row in range(*placement.span(table, rank)))


@pytest.mark.parametrize("world_size", WORLDS)
def test_slots_leave_no_gap(world_size: int) -> None:
    sizes = []
    for rank in range(world_size):
        placement = Placement(ROWS, world_size, rank)
        spans = [placement.span(table, rank) for table in range(len(ROWS))]
        assert placement.first_slots(rank) == [sum(b - a for a, b in spans[:t]) for t in range(len(ROWS) + 1)]
        sizes.append(placement.num_slots)
    assert sum(sizes) == sum(ROWS)


def test_short_tables_are_spread() -> None:
    """Sixteen tables of one row on four ranks: four each, not sixteen on the first."""
    assert [Placement((1,) * 16, 4, rank).num_slots for rank in range(4)] == [4, 4, 4, 4]


def test_the_papers_tables_over_512_ranks() -> None:
    rows = (10_000_000,) * 600
    slots = Placement(rows, 512, 17).num_slots
    assert abs(slots - 600 * 10_000_000 / 512) < 600  # at most a row of each table off the even part


def whole_tables(world_size: int, dtype: torch.dtype, seed: int = 3, dim: int = 8) -> list[Tensor]:
    """Each table put together from the shards of all ranks."""
    parts: list[list[tuple[int, Tensor]]] = [[] for _ in ROWS]
    for rank in range(world_size):
        tables = EmbeddingTables(ROWS, dim, dtype, seed, Placement(ROWS, world_size, rank))
        for table, shard in enumerate(tables.shards()):
            assert shard.shape == (ROWS[table], dim)
            assert shard.values.shape == (shard.stop - shard.start, dim)
            if shard.stop > shard.start:
                parts[table].append((shard.start, shard.values))
    return [torch.cat([values for _, values in sorted(part, key=lambda p: p[0])]) for part in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_initial_rows_do_not_depend_on_the_number_of_ranks(dtype: torch.dtype) -> None:
    reference = whole_tables(1, dtype)
    for world_size in WORLDS[1:]:
        for table, rows in enumerate(whole_tables(world_size, dtype)):
            assert torch.equal(rows, reference[table])


def test_initial_rows_are_uniform_and_unlike() -> None:
    rows = 40_000
    tables = EmbeddingTables((rows, rows), 16, torch.float32, 5, Placement((rows, rows), 1, 0))
    first, second = (shard.values for shard in tables.shards())
    for values in (first, second):
        bound = 1 / math.sqrt(rows)
        assert -bound <= values.min() < -0.999 * bound
        assert 0.999 * bound < values.max() < bound
        histogram = torch.histc(values, bins=50, min=-bound, max=bound)
        expected = values.numel() / 50
        assert ((histogram - expected) ** 2 / expected).sum() < 100  # chi-squared, 49 degrees: 1e-5 of all seeds
    assert abs(torch.corrcoef(torch.stack((first.flatten(), second.flatten())))[0, 1]) < 0.005
    assert abs(torch.corrcoef(torch.stack((first[:-1].flatten(), first[1:].flatten())))[0, 1]) < 0.005
    assert first.unique().numel() > 0.95 * first.numel()


def test_the_seed_matters() -> None:
    assert not torch.equal(whole_tables(1, torch.float32, seed=3)[2], whole_tables(1, torch.float32, seed=4)[2])


def test_rows_longer_than_a_chunk_and_rows_split_over_chunks() -> None:
    """Chunks are an implementation detail: the same values however a table is cut into them."""
    from recipes.models.dhen import row_init

    tables = EmbeddingTables((1000,), 8, torch.float32, 3, Placement((1000,), 1, 0))
    whole = tables.weight.detach().clone()
    previous, row_init._CHUNK_NUMEL = row_init._CHUNK_NUMEL, 24
    try:
        tables.reset_parameters()
    finally:
        row_init._CHUNK_NUMEL = previous
    assert torch.equal(tables.weight, whole)


def test_meta_tables_of_one_rank_of_many() -> None:
    rows = (10_000_000,) * 600
    with torch.device("meta"):
        tables = EmbeddingTables(rows, 128, torch.float16, 0, Placement(rows, 512, 511))
    assert tables.weight.is_meta
    assert tables.num_rows == 6_000_000_000
    assert tables(torch.zeros(4, 600, dtype=torch.int64, device="meta")).shape == (4, 600, 128)
