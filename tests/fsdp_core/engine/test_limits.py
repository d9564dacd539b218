"""The rate limiter, its adaptive kind, the buffer pool and the schedule check, each alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_core.comm.local import LocalWire
from fsdp_core.comm.memory import BufferPool
from fsdp_core.comm.streams import HAPPENED, Event, InlineStreams
from fsdp_core.comm.wire import BufferRole
from fsdp_core.policy import RateLimit
from fsdp_core.runtime.adaptive_limit import AdaptiveLimit, MemorySample, Pressure, pressure_between
from fsdp_core.runtime.rate_limiter import RateLimiter
from fsdp_core.trace.events import Event as Row
from fsdp_core.trace.schedule_check import check_schedule, first_difference


class Slow(Event):
    """Happens when the host waits for it, or when it is told to."""

    def __init__(self) -> None:
        self.done = False
        self.num_waits = 0

    def has_happened(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.num_waits += 1
        self.done = True


# rate limiter -------------------------------------------------------------------------------------------------------


def test_a_permit_is_held_until_the_device_has_finished() -> None:
    limiter = RateLimiter(RateLimit(2))
    first, second = Slow(), Slow()
    assert limiter.enter("a") and limiter.enter("b")
    assert not limiter.make_room(num_spared=0)
    limiter.leave("a", first)
    assert not limiter.make_room(num_spared=1) and limiter.num_inflight == 2
    assert limiter.enter("c") and first.num_waits == 1  # waited for a, no more than needed
    limiter.leave("b", second)
    second.done = True
    assert limiter.num_inflight == 1
    assert limiter.enter("d") and second.num_waits == 0 and limiter.num_waits == 1
    assert limiter.peak_inflight == 2


def test_room_does_not_depend_on_how_far_the_device_is() -> None:
    """Ranks that decided by it would issue different collectives."""
    answers = []
    for is_done in (False, True):
        limiter = RateLimiter(RateLimit(3))
        for name in "ab":
            event = Slow()
            event.done = is_done
            limiter.enter(name)
            limiter.leave(name, event)
        limiter.enter("c")
        answers.append((limiter.make_room(num_spared=2), limiter.make_room(num_spared=1), limiter.make_room(0)))
    assert answers == [(False, True, True)] * 2


def test_units_nested_deeper_than_the_limit_do_not_deadlock() -> None:
    limiter = RateLimiter(RateLimit(1))
    assert limiter.enter("parent")
    assert not limiter.enter("child")
    limiter.leave("child", HAPPENED)
    limiter.leave("unknown", HAPPENED)
    assert limiter.num_inflight == 1


def test_unlimited_never_waits() -> None:
    limiter = RateLimiter(RateLimit(kind="unlimited"))
    for name in "abcdefgh":
        assert limiter.make_room(num_spared=0) and limiter.enter(name)
    assert limiter.num_inflight == 8 and limiter.num_waits == 0


@pytest.mark.parametrize("arguments", [{"max_inflight": 0}, {"kind": "off"}, {"max_inflight": 1.5}])
def test_limits_that_make_no_sense_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="RateLimit"):
        RateLimit(**arguments)  # type: ignore[arg-type]


# adaptive -----------------------------------------------------------------------------------------------------------

quiet = Pressure(0, 500, 100)
full = Pressure(0, 950, 100)
retry = Pressure(3, 990, 300)


def _limits(adaptive: AdaptiveLimit, *pressures: Pressure) -> list[int]:
    return [adaptive.observe(pressure) for pressure in pressures]


def test_a_retry_lowers_the_limit_at_once_and_never_below_one() -> None:
    adaptive = AdaptiveLimit(3, 8)
    assert _limits(adaptive, quiet, retry, retry, retry, retry) == [3, 2, 1, 1, 1]
    assert [(d.step, d.before, d.after) for d in adaptive.decisions] == [(2, 3, 2), (3, 2, 1)]
    assert "retries" in adaptive.decisions[0].reason


def test_quiet_steps_raise_it_up_to_the_ceiling_while_memory_is_left() -> None:
    adaptive = AdaptiveLimit(2, 3)
    assert _limits(adaptive, *[quiet] * 60)[-1] == 3
    adaptive = AdaptiveLimit(2, 3)
    assert set(_limits(adaptive, *[full] * 60)) == {2}


def test_after_a_retry_it_takes_longer_to_try_again() -> None:
    adaptive = AdaptiveLimit(3, 8)
    adaptive.observe(retry)
    limits = _limits(adaptive, *[quiet] * 2 * AdaptiveLimit.QUIET_STEPS)
    assert limits.index(3) == 2 * AdaptiveLimit.QUIET_STEPS - 1


@given(st.lists(st.builds(Pressure, st.integers(0, 3), st.integers(0, 1000), st.integers(0, 1000)), max_size=200))
def test_it_stays_in_bounds_and_equal_inputs_give_equal_limits(pressures: list[Pressure]) -> None:
    one, two = AdaptiveLimit(2, 5), AdaptiveLimit(2, 5)
    for pressure in pressures:
        limit = one.observe(pressure)
        assert 1 <= limit <= 5 and limit == two.observe(pressure)
    assert one.decisions == two.decisions


def test_pressure_counts_what_is_new() -> None:
    first = MemorySample(4, 60, 80, 100)
    assert pressure_between(None, first) == Pressure(4, 800, 200)
    assert pressure_between(first, MemorySample(6, 60, 90, 100)) == Pressure(2, 900, 300)
    assert pressure_between(first, MemorySample(1, 60, 50, 100)) == Pressure(1, 500, 0)  # statistics were reset


# pool ---------------------------------------------------------------------------------------------------------------


def test_buffers_are_reused_unless_somebody_still_uses_them() -> None:
    pool, wire = BufferPool(InlineStreams(), pooled=True), LocalWire(torch.device("cpu"))
    first = pool.acquire(wire, 10, torch.float32, BufferRole.FULL)
    views = first.cached("views", lambda memory: [memory[:4], memory[4:]])
    pool.release(wire, first, BufferRole.FULL)
    again = pool.acquire(wire, 8, torch.float32, BufferRole.FULL)
    assert again is first and again.tensor.numel() == 8 and again.cached("views", lambda memory: []) is views
    kept = again.memory[2:5]
    pool.release(wire, again, BufferRole.FULL)
    other = pool.acquire(wire, 8, torch.float32, BufferRole.FULL)
    assert other is not first
    kept.fill_(1)
    assert pool.num_live[BufferRole.FULL] == 1 and pool.peak_live[BufferRole.FULL] == 1


def test_a_larger_need_grows_a_free_buffer_instead_of_adding_one() -> None:
    pool, wire = BufferPool(InlineStreams(), pooled=True), LocalWire(torch.device("cpu"))
    small = pool.acquire(wire, 4, torch.float32, BufferRole.FULL)
    pool.release(wire, small, BufferRole.FULL)
    large = pool.acquire(wire, 9, torch.float32, BufferRole.FULL)
    pool.release(wire, large, BufferRole.FULL)
    assert pool.acquire(wire, 4, torch.float32, BufferRole.FULL) is large
    assert pool.acquire(wire, 4, torch.bfloat16, BufferRole.FULL) is not large


# schedule check -----------------------------------------------------------------------------------------------------

GOOD = [
    Row("gather", "a"), Row("wait", "a"), Row("forward", "a"), Row("forward_end", "a"), Row("free", "a"),
    Row("gather", "a"), Row("wait", "a"), Row("gradients", "a"), Row("free", "a"), Row("reduce", "a"),
]  # fmt: skip


def test_a_good_schedule_has_no_problems() -> None:
    assert check_schedule(GOOD, max_inflight=1) == []


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([Row("gather", "a"), Row("forward", "a")], "used before"),
        ([Row("gather", "a"), Row("wait", "a"), Row("free", "a"), Row("forward", "a")], "used before"),
        ([Row("gather", "a"), Row("wait", "a"), Row("forward", "a"), Row("free", "a")], "while its forward"),
        ([Row("gather", "a"), Row("gather", "a")], "there already"),
        ([Row("wait", "a")], "without a gather"),
        ([Row("free", "a")], "not gathered"),
        ([Row("gather", "a"), Row("gather", "b")], "2 gathers in flight"),
        ([Row("gather", "a"), Row("wait", "a"), Row("write", "a")], "written"),
        ([Row("reduce", "a")], "before its gradients"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_rule_can_fail(events: list[Row], words: str) -> None:
    problems = check_schedule(events, max_inflight=1)
    assert problems and words in problems[0] and "a" in problems[0]


def test_ranks_that_part_are_told_where() -> None:
    assert first_difference([GOOD, GOOD]) == ""
    other = [*GOOD[:5], Row("gather", "b"), *GOOD[6:]]
    assert first_difference([GOOD, other]) == "step 1: rank 0: gather a, rank 1: gather b"
