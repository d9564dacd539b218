"""Step boundaries: ranks agree to stop or to save; the time limit leaves room for a save; who asked is told."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from recipes.boundary import FORWARDS_BETWEEN_ROUNDS, Agreed, Boundary
from recipes.ranks import Ranks
from recipes.stop import StopRequest
from tests.recipes.loop.recipes_in_tests import context_of
from tests.support.ranks import Pools, Rank

ALONE = Ranks(0, 1, torch.device("cpu"))


def step(boundary: Boundary, ranks: Ranks) -> Agreed:
    return boundary.agree(ranks.sum(torch.tensor(boundary.wishes(), dtype=torch.float64)))


def test_alone_a_request_is_heeded_at_the_end_of_the_step_it_came_in() -> None:
    stop = StopRequest()
    boundary = Boundary(ALONE, stop)
    wishes = boundary.wishes()
    stop.ask("SIGTERM")
    stop.ask("SIGUSR1")
    assert boundary.agree(torch.tensor(wishes)) == Agreed(stop=True)
    assert stop.is_heeded
    assert boundary.reason() == "SIGTERM"


def test_a_save_by_the_clock_is_wished_at_the_beginning_of_a_step() -> None:
    due = [True, False]
    boundary = Boundary(ALONE, StopRequest(), lambda: due.pop(0))
    assert [step(boundary, ALONE) for _ in range(2)] == [Agreed(save=True), Agreed()]


def agreements(rank: Rank) -> list[Any]:
    ranks, stop = Ranks.of(context_of(rank)), StopRequest()
    boundary = Boundary(ranks, stop, lambda: rank.rank == 1)  # only rank 0's clock counts
    seen: list[Any] = [boundary.before_the_first_step().stop, step(boundary, ranks)]
    if rank.rank == 1:
        stop.ask("SIGUSR2")
    seen += [step(boundary, ranks), stop.is_heeded, boundary.reason()]
    return seen


def test_one_ranks_request_stops_all_at_the_same_boundary(ranks: Pools) -> None:
    expected = [False, Agreed(), Agreed(stop=True), True, "SIGUSR2 to rank 1"]
    assert ranks(2).run(agreements) == [expected, expected]


def cut_short(rank: Rank) -> list[Any]:
    stop = StopRequest()
    boundary = Boundary(Ranks.of(context_of(rank)), stop)
    seen: list[Any] = [boundary.is_evaluation_over(FORWARDS_BETWEEN_ROUNDS)]
    if rank.rank == 0:
        stop.ask("SIGTERM")
    rounds = [forwards for forwards in range(1, 3 * FORWARDS_BETWEEN_ROUNDS) if boundary.is_evaluation_over(forwards)]
    return [*seen, rounds, stop.is_heeded]


def test_one_ranks_request_ends_all_evaluations_after_the_same_forward(ranks: Pools) -> None:
    expected = [False, [FORWARDS_BETWEEN_ROUNDS, 2 * FORWARDS_BETWEEN_ROUNDS], True]
    assert ranks(2).run(cut_short) == [expected, expected]


def everybodys(rank: Rank) -> tuple[bool, str]:
    stop = StopRequest()
    stop.ask("SIGTERM")
    boundary = Boundary(Ranks.of(context_of(rank)), stop)
    return boundary.before_the_first_step().stop, boundary.reason()


def test_a_request_during_start_up_is_heeded_before_the_first_step(ranks: Pools) -> None:
    assert ranks(2).run(everybodys) == [(True, "SIGTERM")] * 2


@pytest.mark.parametrize(
    ("left_s", "save_s", "stops"),
    [(1000.0, None, False), (1000.0, 600.0, False), (1000.0, 700.0, True), (-1.0, None, True), (0.5, 0.1, False)],
    ids=["plenty", "just enough", "a save may come too late", "over", "short but enough"],
)
def test_the_time_limit_leaves_room_for_a_save(left_s: float, save_s: float | None, stops: bool) -> None:
    stop = StopRequest(ends_at=time.monotonic() + left_s)
    boundary = Boundary(ALONE, stop, save_s=lambda: save_s)
    assert step(boundary, ALONE).stop is stops
    assert (stop.why == "the time limit (cluster.time_limit)") is stops


def test_a_long_stretch_between_boundaries_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("recipes.boundary.time.monotonic", lambda: now[0])
    boundary = Boundary(ALONE, StopRequest(ends_at=200.0), save_s=lambda: 2.0)
    assert not step(boundary, ALONE).stop
    now[0] = 130.0  # an evaluation: 30 s
    assert not step(boundary, ALONE).stop
    now[0] = 136.9
    assert not step(boundary, ALONE).stop
    now[0] = 137.1  # 2 x 30 + 1.5 x 2 would end behind 200
    assert step(boundary, ALONE).stop


def facts(rank: Rank) -> tuple[list[Any], Any]:
    ranks = Ranks.of(context_of(rank))
    return ranks.exchange({"rank": rank.rank, "text": "ä" * rank.rank}), ranks.tell([rank.rank, None])


def test_ranks_exchange_plain_facts(ranks: Pools) -> None:
    expected = ([{"rank": 0, "text": ""}, {"rank": 1, "text": "ä"}], [0, None])
    assert ranks(2).run(facts) == [expected, expected]
