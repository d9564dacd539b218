"""Where the last step's time goes, from its timeline."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_core.simulate import tape as t
from fsdp_core.simulate.hardware import Hardware
from fsdp_core.simulate.network import collective_s
from fsdp_core.simulate.timeline import Span, Timeline
from recipes.plan.result import TimePlan


def time_of(tape: t.Tape, timeline: Timeline, last_step: int, hardware: Hardware) -> TimePlan:
    """last_step: entry where the step begins."""
    phases, start, end = phases_of(timeline)
    spans = [span for span in timeline.spans if span.end_s > start]
    computing = _merged((max(s.start_s, start), min(s.end_s, end)) for s in spans if s.lane == "compute")
    talking = _merged((max(s.start_s, start), min(s.end_s, end)) for s in spans if s.lane == "channel")
    busy, channel = _length(computing), _length(talking)
    both = busy + channel - _length(_merged((*computing, *talking)))
    step = end - start
    entries = tape.entries[last_step:]
    collectives = [entry for entry in entries if isinstance(entry, t.Collective)]
    num_issued = len(collectives) + sum(isinstance(entry, t.Kernel) for entry in entries)
    return TimePlan(
        step_s=step,
        forward_s=phases["data"] + phases["forward"],
        backward_s=phases["backward"],
        optimizer_s=phases["optimizer"],
        compute_s=busy,
        communication_s=channel,
        exposed_s=channel - both,
        idle_s=max(0.0, step - busy - (channel - both)),
        latency_s=sum(collective_s(one.primitive, 0, one.ranks, hardware) for one in collectives),
        host_s=num_issued * hardware.launch_s,
    )


def step_spans(timeline: Timeline) -> tuple[list[Span], float, float]:
    """Spans of the last step, and when it begins and ends on the compute stream."""
    _, start, end = phases_of(timeline)
    return [span for span in timeline.spans if span.end_s > start], start, end


def phases_of(timeline: Timeline) -> tuple[dict[str, float], float, float]:
    """Seconds of the last step by phase, its start and its end."""
    seconds = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.0)
    start = last = 0.0
    for mark, _, on_device in timeline.marks:
        if mark.kind == "step":
            seconds = dict.fromkeys(seconds, 0.0)
            start = last = on_device
        elif mark.kind == "phase":
            seconds[mark.phase] += on_device - last
            last = on_device
    return seconds, start, last


def _merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)
