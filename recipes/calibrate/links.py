"""Collectives over the engine's own wires: latency of a ring's step and bandwidth, fitted to measured times.

Times are of the wire that ``sharding.wire`` selects, used as the engine uses it: parameters in the wire's own memory,
a gather without a copy where the wire has one, one ``quiesce`` after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from fsdp_core.comm.streams import streams_for
from fsdp_core.comm.wire import BufferRole, Label, Wire
from fsdp_core.simulate.network import REDUCTIONS, sent_bytes
from recipes.calibrate.stopwatch import Stopwatch

_SIZES = {"cpu": (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24), "cuda": (1 << 14, 1 << 20, 1 << 24, 1 << 28)}  # bytes
_OVERLAP_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}
_SIDE, _REACH, _ROUNDS = 8, 7.0, 16  # the grid of a fit: points to a side, logarithms to a side, times it closes in
_SEEN = 1e-3  # of a measured time: less is no latency
MOST_SLOWDOWN = 99.0  # computing stands still beside a collective
SHORTEST_S = 1e-7  # a gather without a copy, less its quiesce, may measure as nothing


@dataclass(frozen=True)
class Timed:
    """One collective. nbytes: of the whole tensor, float32."""

    primitive: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Line:
    """A ring: seconds = rounds x (n - 1) x ``step_s`` + bytes sent by a rank / ``bytes_per_s``; collectives that add
    run at ``reduce_ratio`` of that rate."""

    step_s: float
    bytes_per_s: float
    reduce_ratio: float = 1.0

    def seconds(self, timed: Timed, num_ranks: int) -> float:
        steps, nbytes = terms(timed, num_ranks)
        ratio = self.reduce_ratio if timed.primitive in REDUCTIONS else 1.0
        return steps * self.step_s + nbytes / (self.bytes_per_s * ratio)


def measure(wire: Wire, watch: Stopwatch) -> list[Timed]:
    """Every primitive at every size. Collective over the wire's ranks, which all ranks of the run do at once."""
    found: list[Timed] = []
    for number, nbytes in enumerate(_SIZES[wire.device.type]):
        found += _at_size(wire, watch, max(1, nbytes // 4 // wire.group_size), Label(number, "calibrate"))
    return found


def _at_size(wire: Wire, watch: Stopwatch, numel: int, label: Label) -> list[Timed]:
    """numel: of a shard."""
    shard = wire.empty(numel, torch.float32, BufferRole.SHARD)
    shard.zero_()
    view = wire.full_view(shard)
    full = wire.empty(numel * wire.group_size, torch.float32, BufferRole.FULL) if view is None else view
    gradient = wire.empty(numel * wire.group_size, torch.float32, BufferRole.GRAD_FULL)
    gradient.zero_()
    reduced = wire.empty(numel, torch.float32, BufferRole.GRAD_SHARD)

    def gather() -> None:
        wire.all_gather(full, shard, label).wait()
        wire.quiesce()

    def scatter() -> None:
        wire.reduce_scatter(reduced, gradient, label).wait()

    def reduce() -> None:
        wire.all_reduce(gradient, label).wait()

    gathered_s = max(watch.seconds(gather) - watch.seconds(wire.quiesce), SHORTEST_S)
    nbytes = numel * wire.group_size * 4
    return [
        Timed("all_gather", nbytes, gathered_s),
        Timed("reduce_scatter", nbytes, watch.seconds(scatter)),
        Timed("all_reduce", nbytes, watch.seconds(reduce)),
    ]


def terms(timed: Timed, num_ranks: int) -> tuple[float, float]:
    """(steps of the ring, bytes that a rank sends), as ``fsdp_core.simulate.network`` counts them."""
    rounds = 2 if timed.primitive == "all_reduce" else 1
    return rounds * (num_ranks - 1.0), sent_bytes(timed.primitive, timed.nbytes, num_ranks)


def fitted(times: Sequence[Timed], num_ranks: int) -> Line:
    """The line whose ratios to the times are nearest to 1: least squares of their logarithms, so that three times too
    fast is as bad as three times too slow. Searched on a grid that closes in on the best point; the scale follows.

    Times that measured as nothing say nothing, and are left out if others are there.
    """
    real = [one for one in times if one.seconds > SHORTEST_S] or list(times)
    rows = [(*terms(one, num_ranks), one.primitive in REDUCTIONS, math.log(one.seconds)) for one in real]

    def error_and_scale(log_bytes: float, log_ratio: float) -> tuple[float, float]:
        """Of ``scale x (steps + bytes x e^log_bytes)``, the bytes of reductions divided by ``e^log_ratio``."""
        copied, added = math.exp(log_bytes), math.exp(log_bytes - log_ratio)
        apart = [log_s - math.log(steps + nbytes * (added if adds else copied)) for steps, nbytes, adds, log_s in rows]
        mean = sum(apart) / len(apart)
        return sum((one - mean) ** 2 for one in apart), math.exp(mean)

    center = (math.log(max(steps / nbytes for steps, nbytes, _, _ in rows)), 0.0)
    reach = (2 * _REACH, _REACH if len({adds for _, _, adds, _ in rows}) == 2 else 0.0)  # one kind alone: no ratio
    for _ in range(_ROUNDS):
        rates, ratios = (_around(middle, size) for middle, size in zip(center, reach, strict=True))
        center = min(product(rates, ratios), key=lambda point: error_and_scale(*point)[0])
        reach = (3 * reach[0] / _SIDE, 3 * reach[1] / _SIDE)
    step_s = error_and_scale(*center)[1]
    byte_s, ratio = step_s * math.exp(center[0]), math.exp(center[1])
    is_seen = any(steps * step_s > _SEEN * math.exp(log_s) for steps, _, _, log_s in rows)
    return Line(step_s if is_seen else 0.0, 1 / byte_s, ratio)


def _around(middle: float, size: float) -> list[float]:
    """A row of the grid; one point where it has no size."""
    return [middle + size * step / _SIDE for step in range(-_SIDE, _SIDE + 1)] if size else [middle]


def cross_step_s(whole: Line, intra: Line | None, num_ranks: int, num_hosts: int) -> float:
    """Latency of a step between hosts: what a ring over all ranks takes beyond its steps inside hosts."""
    num_cross = num_hosts - 1
    inside = 0.0 if intra is None else (num_ranks - 1 - num_cross) * intra.step_s
    return max(0.0, ((num_ranks - 1) * whole.step_s - inside) / num_cross)


def overlap_slowdown(wire: Wire, watch: Stopwatch) -> float:
    """How much longer computing takes beside a reduce-scatter. Collective."""
    device = wire.device
    numel = _OVERLAP_BYTES[device.type] // 4 // wire.group_size
    gradient = wire.empty(numel * wire.group_size, torch.float32, BufferRole.GRAD_FULL)
    gradient.zero_()
    reduced = wire.empty(numel, torch.float32, BufferRole.GRAD_SHARD)
    label, streams = Label(0, "calibrate"), streams_for(device)
    side = 256 if device.type == "cpu" else 2048
    a = torch.randn(side, side, device=device)
    out = torch.empty_like(a)

    def talk() -> None:
        wire.reduce_scatter(reduced, gradient, label).wait()

    talking_s = watch.seconds(talk)
    once_s = watch.seconds(lambda: torch.mm(a, a, out=out))
    num_products = max(1, round(2 * talking_s / once_s))

    def compute() -> None:
        for _ in range(num_products):
            torch.mm(a, a, out=out)

    def both() -> None:
        with streams.on_reduce():
            work = wire.reduce_scatter(reduced, gradient, label)
        compute()
        work.wait()

    return slowdown_of(talking_s, watch.seconds(compute), watch.seconds(both))


def slowdown_of(talking_s: float, computing_s: float, both_s: float) -> float:
    """0: nobody is disturbed, ``both_s`` is the longer of the two. ``MOST_SLOWDOWN``: one after the other.

    While the collective runs, computing gets on by ``talking_s`` / (1 + slowdown).
    """
    done_s = talking_s + computing_s - both_s
    if done_s <= talking_s / (1 + MOST_SLOWDOWN):
        return MOST_SLOWDOWN
    return max(0.0, talking_s / done_s - 1)
