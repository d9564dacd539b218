"""Collectives over the engine's own wires: latency of a ring's step and bandwidth, fitted to measured times.

Times are of the wire that ``sharding.wire`` selects, used as the engine uses it: parameters in the wire's own memory,
a gather without a copy where the wire has one, one ``quiesce`` after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp_core.comm.streams import streams_for
from fsdp_core.comm.wire import BufferRole, Label, Wire
from fsdp_core.simulate.network import sent_bytes
from recipes.calibrate.stopwatch import Stopwatch

_SIZES = {"cpu": (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24), "cuda": (1 << 14, 1 << 20, 1 << 24, 1 << 28)}  # bytes
_OVERLAP_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}
MOST_SLOWDOWN = 99.0  # computing stands still beside a collective
_SHORTEST_S = 1e-7  # a gather without a copy, less its quiesce, may measure as nothing


@dataclass(frozen=True)
class Timed:
    """One collective. nbytes: of the whole tensor, float32."""

    primitive: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Line:
    """A ring: seconds = rounds x (n - 1) x ``step_s`` + bytes sent by a rank / ``bytes_per_s``."""

    step_s: float
    bytes_per_s: float

    def seconds(self, timed: Timed, num_ranks: int) -> float:
        steps, nbytes = terms(timed, num_ranks)
        return steps * self.step_s + nbytes / self.bytes_per_s


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

    gathered_s = max(watch.seconds(gather) - watch.seconds(wire.quiesce), _SHORTEST_S)
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
    """The line with the least relative error (its squares, summed), latency and time per byte not below 0."""
    rows = [(*terms(one, num_ranks), one.seconds) for one in times]
    scaled = [(steps / seconds, nbytes / seconds) for steps, nbytes, seconds in rows]
    ss, bb = sum(s * s for s, _ in scaled), sum(b * b for _, b in scaled)
    sb, s1, b1 = sum(s * b for s, b in scaled), sum(s for s, _ in scaled), sum(b for _, b in scaled)
    determinant = ss * bb - sb * sb
    if determinant > 0:
        step_s, byte_s = (bb * s1 - sb * b1) / determinant, (ss * b1 - sb * s1) / determinant
    else:
        step_s, byte_s = 0.0, b1 / bb
    if step_s < 0:
        step_s, byte_s = 0.0, b1 / bb
    if byte_s <= 0:
        step_s, byte_s = s1 / ss, 1e-15
    return Line(step_s, 1 / byte_s)


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
