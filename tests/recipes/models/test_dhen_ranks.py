"""Embedding tables over several processes give the numbers of one."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.models.dhen.placement import Placement
from recipes.models.dhen.tables import EmbeddingTables
from tests.recipes.models.on_ranks import (
    ROWS,
    Engaged,
    Part,
    Trained,
    outside_then_inside,
    route_of_repeats,
    train,
    train_with_engine,
    uneven_ids,
    uneven_lookup,
)
from tests.support.ranks import Pools

WORLDS = [2, 4]


@cache
def alone(table_dtype: str) -> Trained:
    torch.manual_seed(0)
    return train(None, table_dtype, 1)


def whole(per_rank: list[list[Part]]) -> list[Tensor]:
    """Tables put together from the parts of all ranks."""
    tables = []
    for table in range(len(per_rank[0])):
        pieces = sorted((p[table] for p in per_rank if p[table].values.shape[0]), key=lambda part: part.start)
        assert [piece.start for piece in pieces] == [
            sum(piece.values.shape[0] for piece in pieces[:n]) for n in range(len(pieces))
        ]
        tables.append(torch.cat([piece.values for piece in pieces]))
    return tables


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_training_does_not_depend_on_the_number_of_ranks(ranks: Pools, world_size: int, num_micro_batches: int) -> None:
    reference = alone("float32")
    trained = ranks(world_size).run(train, "float32", num_micro_batches)
    for rank in trained:
        assert rank.losses == pytest.approx(reference.losses, rel=1e-6)
    for pieces, expected in [
        ([rank.tables for rank in trained], reference.tables),
        ([rank.sums for rank in trained], reference.sums),
    ]:
        for table, values in enumerate(whole(pieces)):
            torch.testing.assert_close(values, expected[table].values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", WORLDS)
def test_low_precision_tables_too(ranks: Pools, world_size: int) -> None:
    """Every step rounds to float16, whose neighbours differ by 1e-3: the losses agree, not the last bits."""
    trained = ranks(world_size).run(train, "float16", 2)
    assert trained[0].losses == pytest.approx(alone("float16").losses, rel=1e-3)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    ("table_dtype", "dtype"),
    [("float32", "float32"), ("float16", "bfloat16"), ("float16", "float32"), ("float32", "bfloat16")],
)
def test_uneven_batches_and_a_rank_without_samples(ranks: Pools, world_size: int, table_dtype: str, dtype: str) -> None:
    """Rows arrive bit for bit; gradients are the sum over ranks, on the owner."""
    results = ranks(world_size).run(uneven_lookup, table_dtype, dtype)
    lone = EmbeddingTables(ROWS, 8, getattr(torch, table_dtype), seed=3, placement=Placement(ROWS, 1, 0))
    weights = [shard.values.float().requires_grad_() for shard in lone.shards()]
    for number, (rows, _) in enumerate(results):
        ids = uneven_ids(number)
        assert torch.equal(rows, lone(ids, getattr(torch, dtype)))
        looked_up = torch.stack([F.embedding(ids[:, table], weight) for table, weight in enumerate(weights)], dim=1)
        (looked_up * (1.0 + number)).sum().backward()
    for table, gradient in enumerate(whole([gradient for _, gradient in results])):
        assert torch.equal(gradient, weights[table].grad)  # small whole numbers: exact in every dtype


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_bad_id_is_an_error_everywhere_and_nobody_waits(ranks: Pools, world_size: int) -> None:
    outcomes = ranks(world_size).run(outside_then_inside)
    assert all(works_again for _, works_again in outcomes)
    *others, own = [message for message, _ in outcomes]
    assert own == "embedding table 1 has 3 rows; the batch asks for row 3"
    assert all(other.startswith("another rank's batch asks for a row outside") for other in others)


def test_a_repeated_row_is_sent_once(ranks: Pools) -> None:
    (sent_0, asked_of_0), (sent_1, asked_of_1) = ranks(2).run(route_of_repeats)
    assert (sent_0, sent_1) == (2, 2)
    assert asked_of_0 == [0, 1]
    assert asked_of_1 == [5, 5]  # once by each rank


@cache
def engaged_alone() -> Engaged:
    return train_with_engine(None, 1)


@pytest.mark.parametrize(("world_size", "factor"), [(2, 2), (2, 1), (4, 2)])
def test_under_the_engine(ranks: Pools, world_size: int, factor: int) -> None:
    """The engine leaves the tables alone, and clips by the norm of what it manages: the same for any W and F."""
    reference = engaged_alone()
    results = ranks(world_size).run(train_with_engine, factor)
    for result in results:
        assert result.losses == pytest.approx(reference.losses, rel=1e-5)
        assert result.norms == pytest.approx(reference.norms, rel=1e-5)
        assert result.managed == ["tables.weight"]  # still there, with this rank's rows alone
    for table, values in enumerate(whole([result.tables for result in results])):
        torch.testing.assert_close(values, reference.tables[table].values, rtol=1e-4, atol=1e-5)
