"""Three actors by hand: the host runs ahead, streams keep their order, collectives share one channel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_core.simulate import tape as t
from fsdp_core.simulate.hardware import Hardware
from fsdp_core.simulate.timeline import Span, kernel_s, play

# One byte of memory traffic and one FLOP take a second each; issuing takes 0.1 s; a ring's step takes nothing.
HARDWARE = Hardware(
    half_flops_per_s=1.0,
    single_flops_per_s=0.5,
    memory_bytes_per_s=1.0,
    usable_bytes=10**9,
    devices_per_host=8,
    intra_bytes_per_s=1.0,
    cross_bytes_per_s=1.0,
    compute_efficiency=1.0,
    memory_efficiency=1.0,
    intra_efficiency=1.0,
    cross_efficiency=1.0,
    intra_step_s=0.0,
    cross_step_s=0.0,
    launch_s=0.1,
    kernel_s=0.01,
)


def kernel(seconds: int, stream: int = t.COMPUTE, name: str = "k") -> t.Kernel:
    return t.Kernel(name, stream, 0.0, seconds, True)


def gather(seconds: int, event: int, stream: int = t.GATHER) -> t.Collective:
    return t.Collective("all_gather", stream, event, 2 * seconds, (0, 1), "unit", "forward")


def spans(entries: list[t.Entry], hardware: Hardware = HARDWARE) -> list[tuple[str, float, float]]:
    line = play(t.Tape(entries), hardware)
    return [(span.lane, round(span.start_s, 6), round(span.end_s, 6)) for span in line.spans]


@pytest.mark.parametrize(
    ("one", "seconds"),
    [
        (t.Kernel("mm", 0, 10.0, 1, True), 10.0),
        (t.Kernel("mm", 0, 10.0, 1, False), 20.0),
        (t.Kernel("add", 0, 0.0, 7, True), 7.0),
        (t.Kernel("scalar", 0, 0.0, 0, True), 0.01),
    ],
    ids=["computing in 16 bit", "computing in 32 bit", "moving", "the shortest kernel"],
)
def test_a_kernel_takes_the_longer_of_computing_and_moving(one: t.Kernel, seconds: float) -> None:
    assert kernel_s(one, HARDWARE) == pytest.approx(seconds)


def test_the_host_runs_ahead_of_its_stream() -> None:
    assert spans([kernel(5), kernel(5)]) == [("compute", 0.1, 5.1), ("compute", 5.1, 10.1)]


def test_a_stream_waits_for_a_gather_and_the_host_does_not() -> None:
    entries = [gather(4, event=0), t.Wait(0, t.COMPUTE), kernel(1), kernel(1, t.REDUCE)]
    # the reduce stream's kernel starts as soon as it is issued: nobody ordered it behind the gather
    assert spans(entries) == [("channel", 0.1, 4.1), ("compute", 4.1, 5.1), ("reduce", 0.3, 1.3)]


def test_collectives_of_different_streams_take_turns_on_the_channel() -> None:
    entries = [gather(4, 0), gather(2, 1, t.REDUCE)]
    assert spans(entries) == [("channel", 0.1, 4.1), ("channel", 4.1, 6.1)]


def test_a_collective_does_not_hold_its_stream_up() -> None:
    assert spans([gather(4, 0), kernel(1, t.GATHER)])[1] == ("gather", 0.2, 1.2)


def test_the_rate_limiter_stops_the_host() -> None:
    entries = [kernel(5), t.Record(0, t.COMPUTE), t.HostWait(0), gather(1, 1)]
    assert spans(entries)[1] == ("channel", 5.2, 6.2)


def test_an_event_lies_behind_what_was_on_the_stream_when_it_was_recorded() -> None:
    entries = [kernel(3), t.Record(0, t.COMPUTE), kernel(5), t.Wait(0, t.REDUCE), kernel(1, t.REDUCE)]
    assert spans(entries)[2] == ("reduce", 3.1, 4.1)


def test_computing_is_slower_while_a_collective_runs_beside_it() -> None:
    # from 0.2 s on: beside the channel (busy till 4.1 s) 1.5 s buy 1 s of work; 2.6 s are done by then
    entries = [gather(4, 0), kernel(10)]
    end = spans(entries, replace(HARDWARE, overlap_slowdown=0.5))[1][2]
    assert end == pytest.approx(4.1 + 10 - 3.9 / 1.5)


def test_a_freed_block_is_busy_until_every_stream_that_used_it_has_got_past() -> None:
    entries: list[t.Entry] = [
        t.Alloc(7, 512, t.GATHER, "full"),
        kernel(5),
        t.UsedOn(7, t.COMPUTE),
        t.Free(7),
        t.Alloc(8, 512, t.GATHER, "full"),
        t.Free(8),
    ]
    line = play(t.Tape(entries), HARDWARE)
    assert line.busy_until_s == pytest.approx({3: 5.1, 5: 0.0})


def test_a_hypothesis_lets_gathers_of_the_forward_wait_for_computing() -> None:
    entries = [kernel(5), gather(4, 0), t.Wait(0, t.COMPUTE), kernel(1)]
    assert spans(entries)[1:] == [("channel", 0.2, 4.2), ("compute", 5.1, 6.1)]
    waiting = replace(HARDWARE, gathers_wait_in_forward=1.0)
    assert spans(entries, waiting)[1:] == [("channel", 5.1, 9.1), ("compute", 9.1, 10.1)]
    half = replace(HARDWARE, gathers_wait_in_forward=0.5)
    assert spans(entries, half)[1:] == [("channel", 3.1, 7.1), ("compute", 7.1, 8.1)]
    late = replace(gather(4, 0), phase="backward")
    assert spans([kernel(5), late], waiting)[1] == ("channel", 0.2, 4.2)


def test_places_and_marks() -> None:
    entries: list[t.Entry] = [t.Mark("forward", "layer.0", ""), kernel(2), t.Mark("step", "", "")]
    line = play(t.Tape(entries), HARDWARE)
    assert line.spans == [Span("compute", "k", "layer.0", "forward", 0.1, 2.1)]
    assert line.marks[1] == (entries[2], pytest.approx(0.1), pytest.approx(2.1))
    assert line.end_s == pytest.approx(2.1)
