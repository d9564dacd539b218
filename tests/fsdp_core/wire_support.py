"""What the wire tests run on ranks: building a wire, values that depend on rank and place, a step-like pattern."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_core.comm.select import choose_wire
from fsdp_core.comm.wire import BufferRole, Label, Wire, Work
from tests.support.ranks import Rank

WIRES = ("collectives", "gloo_p2p", "shared_memory")
CPU = torch.device("cpu")
LABEL = Label(3, "forward", "blocks.3")
_groups: dict[str, dist.ProcessGroup] = {}  # per process: one torch group per wire for the whole session


@contextlib.contextmanager
def wire_on(
    rank: Rank,
    name: str,
    *,
    own_group: bool = False,
    timeout_s: float = 20.0,
    ranks_per_host: int | None = None,
) -> Iterator[Wire]:
    """The wire ``name`` between all ranks. ``own_group``: one that nobody uses after a test that breaks it."""
    ranks = list(range(rank.world_size))
    group = None
    if rank.world_size > 1:
        if own_group or name not in _groups:
            group = dist.new_group(ranks)
            if not own_group:
                _groups[name] = group
        group = group or _groups[name]
    selection = choose_wire(
        name,  # type: ignore[arg-type]
        group=group,
        ranks=ranks,
        device=CPU,
        ranks_per_host=ranks_per_host,
        timeout=timedelta(seconds=timeout_s),
    )
    assert selection.wire.name == (name if rank.world_size > 1 else "local"), selection.message
    try:
        yield selection.wire
    finally:
        selection.wire.close()


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What ``rank`` contributes; every rank can compute every other rank's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    if dtype.is_complex:
        parts = torch.randn(2, numel, generator=generator)
        return torch.complex(parts[0], parts[1]).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 9, (numel,), generator=generator).to(dtype)


def sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def check_sum(wire_name: str, got: Tensor, expected: Tensor) -> None:
    """The CPU wires add in rank order, to the bit; other backends in an order of their own."""
    if wire_name != "collectives":
        assert torch.equal(got, expected), (got.dtype, got.numel())
    else:
        is_low = got.dtype in (torch.bfloat16, torch.float16)
        torch.testing.assert_close(got, expected, rtol=2e-2 if is_low else 1e-5, atol=5e-2 if is_low else 1e-6)


def poison(tensor: Tensor) -> None:
    tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 1)


class ToyTraining:
    """Steps of the shape the engine has, on plain vectors: gather each unit twice, reduce its gradient, update.

    The weights of all units and ranks are simulated beside it in one process, so every gathered tensor and every
    gradient has a known value. Ranks sleep at random places, so that they meet in every possible order.
    """

    def __init__(self, rank: Rank, wire: Wire, sizes: list[int], *, use_views: bool, max_pending: int = 2) -> None:
        self.rank, self.wire, self.sizes = rank, wire, sizes
        self.world = rank.world_size
        self.max_pending = max_pending
        self.random = random.Random(rank.rank)
        self.shards = [wire.empty(size, torch.float32, BufferRole.SHARD) for size in sizes]
        self.expected = [values(unit, size * self.world, torch.float32, seed=7) for unit, size in enumerate(sizes)]
        for unit, size in enumerate(sizes):
            mine = slice(rank.rank * size, (rank.rank + 1) * size)
            self.shards[unit].copy_(self.expected[unit][mine])
        self.views = [wire.full_view(shard) if use_views else None for shard in self.shards]
        largest = max(sizes) * self.world
        self.full = wire.empty(largest, torch.float32, BufferRole.FULL)
        self.free = [wire.empty(largest, torch.float32, BufferRole.GRAD_FULL) for _ in range(max_pending + 1)]
        self.pending: list[tuple[int, Work, Tensor, Tensor]] = []
        self.gradients: dict[int, Tensor] = {}

    def linger(self) -> None:
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 1e-3)

    def gather(self, unit: int, phase: str) -> None:
        numel = self.sizes[unit] * self.world
        full = self.views[unit]
        if full is None:
            full = self.full[:numel]
        poison(full)  # what a gather leaves out shows
        self.wire.all_gather(full, self.shards[unit], Label(unit, phase, f"unit{unit}")).wait()
        self.linger()
        assert torch.equal(full, self.expected[unit]), f"unit {unit} was gathered wrong in {phase}"

    def reduce(self, unit: int, step: int) -> None:
        if len(self.pending) >= self.max_pending:
            self.finish_oldest()
        numel = self.sizes[unit] * self.world
        source = self.free.pop()
        source[:numel].copy_(values(self.rank.rank, numel, torch.float32, seed=100 + 10 * step + unit))
        target = torch.full((self.sizes[unit],), float("nan"))
        work = self.wire.reduce_scatter(target, source[:numel], Label(unit, "reduce", f"unit{unit}"))
        self.pending.append((unit, work, source, target))

    def finish_oldest(self) -> None:
        unit, work, source, target = self.pending.pop(0)
        work.wait()
        poison(source)  # a peer that still reads this gets NaN
        self.free.append(source)
        self.gradients[unit] = target

    def step(self, step: int) -> None:
        for unit in range(len(self.sizes)):
            self.gather(unit, "forward")
        for unit in reversed(range(len(self.sizes))):
            self.gather(unit, "backward")
            self.reduce(unit, step)
        while self.pending:
            self.finish_oldest()
        self.wire.quiesce()
        for unit, size in enumerate(self.sizes):
            seed = 100 + 10 * step + unit
            parts = [values(peer, size * self.world, torch.float32, seed) for peer in range(self.world)]
            total = sum_in_order(parts)
            mine = slice(self.rank.rank * size, (self.rank.rank + 1) * size)
            check_sum(self.wire.name, self.gradients[unit], total[mine])
            update = 0.1 * total
            self.shards[unit].fill_(float("nan"))  # a peer that reads while the optimizer writes gets NaN
            self.linger()
            self.expected[unit] -= update
            self.shards[unit].copy_(self.expected[unit][mine])
