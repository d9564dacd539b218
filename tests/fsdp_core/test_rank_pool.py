"""The warm ranks themselves: values come back in order, errors and deaths are told, a broken pool is replaced."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import Pools, Rank, RanksFailed


def _sum_of_ranks(rank: Rank, offset: int) -> float:
    tensor = torch.tensor([float(rank.rank + offset)])
    dist.all_reduce(tensor)
    return tensor.item()


def _raise_on(rank: Rank, culprit: int) -> int:
    if rank.rank == culprit:
        raise ValueError("from this rank")
    return rank.rank


def _die_on(rank: Rank, culprit: int) -> int:
    if rank.rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank.rank


def test_values_come_back_in_rank_order(ranks: Pools) -> None:
    assert ranks(2).run(_sum_of_ranks, 1) == [3.0, 3.0]


def test_an_error_keeps_its_type_and_names_its_rank(ranks: Pools) -> None:
    with pytest.raises(RanksFailed, match=r"rank 1:[\s\S]*from this rank") as caught:
        ranks(2).run(_raise_on, 1)
    assert [type(outcome.error) for outcome in caught.value.outcomes] == [type(None), ValueError]


def test_a_pool_with_a_dead_rank_is_replaced(ranks: Pools) -> None:
    outcomes = ranks(2).outcomes(_die_on, 0)
    assert [outcome.has_died for outcome in outcomes] == [True, False]
    assert ranks(2).run(_sum_of_ranks, 0) == [1.0, 1.0]
