"""When everything on a tape happens: the host in its order, each stream in its order, one channel for collectives.

The host runs ahead of the device and stops only where the tape says so. A kernel starts when its stream is free and
the host has issued it. A collective starts when its stream has got there and the channel is free (NCCL gives a
communicator one stream), and only those who wait for its event wait for it. Pure and deterministic.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from fsdp_core.simulate import tape as t
from fsdp_core.simulate.hardware import Hardware
from fsdp_core.simulate.network import collective_s


@dataclass(frozen=True, slots=True)
class Span:
    """Something that occupied a stream, or (``channel``) the network."""

    lane: str
    name: str
    unit: str
    phase: str
    start_s: float
    end_s: float


@dataclass
class Timeline:
    """spans: in the order the host issued them. host_s: the host's clock at every entry. busy_until_s: by ``Free``
    entry, until when the streams that have used the block are busy. marks: with the host's and the compute stream's
    time. end_s: when everything is done."""

    spans: list[Span] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    busy_until_s: dict[int, float] = field(default_factory=dict)
    marks: list[tuple[t.Mark, float, float]] = field(default_factory=list)
    end_s: float = 0.0


class _Channel:
    """Collectives, one after the other; remembers when it was busy so that computing can be slowed down meanwhile."""

    def __init__(self) -> None:
        self.free_s = 0.0
        self.starts: list[float] = []
        self.ends: list[float] = []

    def run(self, ready_s: float, duration_s: float) -> tuple[float, float]:
        start = max(ready_s, self.free_s)
        self.free_s = start + duration_s
        self.starts.append(start)
        self.ends.append(self.free_s)
        return start, self.free_s

    def stretched(self, start_s: float, duration_s: float, slowdown: float) -> float:
        """End of ``duration_s`` of computing that begins at ``start_s`` and is slower while the channel is busy."""
        now, left = start_s, duration_s
        index = bisect_left(self.ends, now)
        while left > 0 and index < len(self.starts):
            if self.starts[index] > now:
                alone = min(left, self.starts[index] - now)
                now, left = now + alone, left - alone
                continue
            beside = self.ends[index] - now
            if beside > 0:
                done = min(left, beside / (1 + slowdown))
                now, left = now + done * (1 + slowdown), left - done
            index += 1
        return now + left


def kernel_s(kernel: t.Kernel, hardware: Hardware) -> float:
    """The longer of computing and moving, never shorter than the shortest kernel."""
    moving = kernel.nbytes / (hardware.memory_bytes_per_s * hardware.memory_efficiency)
    peak = hardware.half_flops_per_s if kernel.is_half else hardware.single_flops_per_s
    return max(kernel.flops / (peak * hardware.compute_efficiency), moving, hardware.kernel_s)


def play(tape: t.Tape, hardware: Hardware) -> Timeline:
    """The whole tape, from an idle device."""
    line, channel = Timeline(), _Channel()
    host = 0.0
    streams = dict.fromkeys(t.STREAMS, 0.0)
    events: dict[int, float] = {}
    users: dict[int, set[int]] = {alloc.block: {alloc.stream} for alloc in tape.held}
    place = ("", "")  # unit and phase the compute stream is in
    for index, entry in enumerate(tape.entries):
        match entry:
            case t.Kernel():
                host += hardware.launch_s
                start = max(host, streams[entry.stream])
                duration = kernel_s(entry, hardware)
                end = start + duration
                if entry.stream == t.COMPUTE and hardware.overlap_slowdown:
                    end = channel.stretched(start, duration, hardware.overlap_slowdown)
                streams[entry.stream] = end
                line.spans.append(Span(t.STREAMS[entry.stream], entry.name, *place, start, end))
            case t.Collective():
                host += hardware.launch_s
                duration = collective_s(entry.primitive, entry.nbytes, entry.ranks, hardware)
                ready = max(host, streams[entry.stream])
                waits = hardware.gathers_wait_in_forward
                if waits and (entry.primitive, entry.phase) == ("all_gather", "forward"):
                    ready = max(ready, streams[t.COMPUTE] - (1 - waits) * duration)
                start, end = channel.run(ready, duration)
                events[entry.event] = end
                line.spans.append(Span("channel", entry.primitive, entry.unit, entry.phase, start, end))
            case t.Record():
                events[entry.event] = streams[entry.stream]
            case t.Wait():
                streams[entry.stream] = max(streams[entry.stream], events.get(entry.event, 0.0))
            case t.HostWait():
                host = max(host, events.get(entry.event, 0.0))
            case t.Alloc():
                users[entry.block] = {entry.stream}
            case t.UsedOn():
                users[entry.block].add(entry.stream)
            case t.Free():
                own_and_others = users.pop(entry.block)
                line.busy_until_s[index] = max(streams[stream] for stream in own_and_others)
            case t.Mark():
                if entry.kind in ("forward", "backward"):
                    place = (entry.unit, entry.kind)
                line.marks.append((entry, host, streams[t.COMPUTE]))
        line.host_s.append(host)
    line.end_s = max(host, channel.free_s, *streams.values())
    return line
