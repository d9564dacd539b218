"""Watching a run: labels in torch's profiler, the schedule check of every step, decisions of the adaptive limit."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fsdp_core
from fsdp_core.errors import EngineError, MismatchError, StateError
from fsdp_core.runtime.adaptive_limit import MemorySample
from fsdp_core.runtime.find import contexts_in
from tests.support.parity import batches_for, mean_square
from tests.support.ranks import Pools, Rank


def _model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return fsdp_core.fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), units=[nn.Linear], **options)


# profiler -------------------------------------------------------------------------------------------------------------


def _labels(rank: Rank) -> list[str]:
    model, batch = _model(wire="collectives"), batches_for(rank.world_size, 3, 4)[rank.rank]
    mean_square(model, batch).backward()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        mean_square(model, batch).backward()
    return [event.name for event in recorded.events() if event.name.startswith("fsdp_core.")]


def test_the_profiler_sees_what_the_engine_does_for_which_unit(ranks: Pools) -> None:
    names = ranks(2).run(_labels)[0]
    assert names.count("fsdp_core.gather 1") == names.count("fsdp_core.wait 1") == 2  # forward, backward
    assert {name: names.count(name) for name in names if " 0" in name} == {
        "fsdp_core.gather 0": 1, "fsdp_core.wait 0": 1, "fsdp_core.forward 0": 1, "fsdp_core.reduce 0": 1,
    }  # fmt: skip
    assert names[-1] == "fsdp_core.finish reductions of <root>"


# flight recorder ------------------------------------------------------------------------------------------------------


class Told:
    def __init__(self) -> None:
        self.rows: list[str] = []

    def event(self, kind: str, unit: str = "", phase: str = "") -> None:
        self.rows.append(" ".join(word for word in (kind, unit, phase) if word))


def _told(rank: Rank) -> list[str]:
    model, batch = _model(wire="collectives"), batches_for(rank.world_size, 3, 4)[rank.rank]
    told = Told()
    for recorder in (None, told, None):
        fsdp_core.record_flight(model, recorder)
        mean_square(model, batch).backward()
    return told.rows


def test_a_recorder_is_told_where_a_rank_turns_to_before_it_does(ranks: Pools) -> None:
    """Seven a unit and step at most: what is called for nothing is paid for in every run."""
    assert ranks(2).run(_told)[0] == [
        "pass", "forward <root>",
        "gather 0 forward", "forward 0", "forward_end 0",
        "gather 1 forward", "forward 1", "forward_end 1",
        "gather 2 forward", "forward 2", "forward_end 2",
        "forward_end <root>",
        "gather 1 prefetch", "backward 2", "reduce 2",
        "await 1 backward", "backward 1", "reduce 1",
        "reduce 0",
        "finish", "settle", "backward_end",
    ]  # fmt: skip


def test_the_newest_event_says_where_an_error_came_up() -> None:
    model, told = _model(), Told()
    model[1].forward = lambda x: x @ x
    fsdp_core.record_flight(model, told)
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 4))
    assert told.rows[-1] == "forward 1"


# schedule check -------------------------------------------------------------------------------------------------------


def _verified(rank: Rank, damage: str) -> tuple[type[EngineError], str] | None:
    model, batch = _model(), batches_for(rank.world_size, 3, 4)[rank.rank]
    log = fsdp_core.start_trace(model)
    mean_square(model, batch).backward()
    fsdp_core.stop_trace(model)
    reductions = [index for index, event in enumerate(log.events) if event.kind == "reduce"]
    if damage == "no wait" and rank.rank == 1:
        log.events = [event for event in log.events if (event.kind, event.unit) != ("wait", "1")]
    if damage == "order" and rank.rank == 1:
        first, second = reductions[1:3]
        log.events[first], log.events[second] = log.events[second], log.events[first]
        log.events.sort(key=lambda event: event.kind != "gradients")  # the order alone is wrong, no other rule
        log.events = [event for event in log.events if event.kind in ("gradients", "reduce")]
    if damage == "order" and rank.rank == 0:
        log.events = [event for event in log.events if event.kind in ("gradients", "reduce")]
    try:
        fsdp_core.verify_schedule(model, log)
    except EngineError as error:
        return type(error), str(error)
    mean_square(model, batch).backward()  # the check leaves the wires as they were
    return None


def test_a_right_step_passes_the_check(ranks: Pools) -> None:
    assert ranks(2).run(_verified, "none") == [None, None]


def test_a_broken_rule_is_told_on_all_ranks_with_rank_and_unit(ranks: Pools) -> None:
    for kind, text in ranks(2).run(_verified, "no wait"):
        assert kind is StateError and "rank 1: event" in text and "forward 1" in text and "used before" in text


def test_another_order_is_told_on_all_ranks(ranks: Pools) -> None:
    for kind, text in ranks(2).run(_verified, "order"):
        assert kind is MismatchError and "rank 0: reduce 1, rank 1: reduce 0" in text


# adaptive limit -------------------------------------------------------------------------------------------------------


def test_a_change_of_the_adaptive_limit_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = _model(rate_limit=fsdp_core.RateLimit(3, kind="adaptive"))
    agreement = contexts_in(model)[0].limit_agreement
    assert agreement is not None
    samples = iter([MemorySample(retries, 60, 90, 100) for retries in (0, 2, 2)])
    agreement._sample = lambda: next(samples)
    log = fsdp_core.start_trace(model)
    with caplog.at_level(logging.INFO, logger="fsdp_core"):
        for _ in range(3):
            mean_square(model, batches_for(1, 3, 4)[0]).backward()
    assert [record.getMessage() for record in caplog.records] == ["rate limit 3 -> 2 from step 3: 2 allocation retries"]
    assert [event.phase for event in log.events if event.kind == "limit"] == ["3 to 2"]
