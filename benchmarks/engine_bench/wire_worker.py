"""The process of one rank in the wire benchmark.

    python -m engine_bench.wire_worker FD RANK WORLD_SIZE PORT WIRE JSON

Command (pickled tuple): (primitive, numel of a shard, repeats) -> seconds per call, one entry per repeat.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine_bench.serve import serve
from fsdp_core.comm.collectives import CollectivesWire
from fsdp_core.comm.envelope import Envelope
from fsdp_core.comm.gloo_p2p import GlooP2PWire, _Exchange
from fsdp_core.comm.rendezvous import GroupRendezvous
from fsdp_core.comm.select import choose_wire
from fsdp_core.comm.shared_memory import SharedMemoryWire
from fsdp_core.comm.wire import BufferRole, Label, Wire

CALLS_PER_REPEAT = 4


class UnlabelledGloo(GlooP2PWire):
    """The same messages without envelopes: what the check of labels costs is the difference."""

    def _begin(
        self, kind: str, label: Label, numel: int, dtype: torch.dtype, op: str = "sum", argument: int = 0
    ) -> Any:
        return _Exchange(self, Envelope(0, kind, label, numel, dtype, op, argument).pack()), 1


class UnlabelledSharedMemory(SharedMemoryWire):
    """The same without comparing envelopes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._board.compare = lambda: None  # type: ignore[method-assign]


def main() -> None:
    fd, rank, world_size, port = map(int, sys.argv[1:5])
    serve(fd, lambda: _start(sys.argv[5], rank, world_size, port, **json.loads(sys.argv[6])))


def _start(name: str, rank: int, world_size: int, port: int) -> Callable[[tuple[Any, ...]], Any]:
    store = dist.PrefixStore("bench", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store, timeout=timedelta(minutes=5))
    wire = build(name, list(range(world_size)))
    serial = itertools.count()

    def answer(command: tuple[Any, ...]) -> list[float]:
        primitive, numel, repeats = command
        call = calls(wire, primitive, numel)
        times = []
        for _ in range(repeats + 1):
            dist.barrier()
            label = Label(next(serial), "forward", "model.blocks.7")
            started = time.perf_counter()
            for _ in range(CALLS_PER_REPEAT):
                call(label)
            wire.quiesce()
            times.append((time.perf_counter() - started) / CALLS_PER_REPEAT)
        return times[1:]

    return answer


def build(name: str, ranks: Sequence[int]) -> Wire:
    group = dist.new_group(list(ranks))
    if name == "gloo_p2p without labels":
        return UnlabelledGloo(group, ranks)
    if name == "shared_memory without labels":
        return UnlabelledSharedMemory(GroupRendezvous(group))
    if name == "collectives without labels":  # between collectives, as on CUDA: at ``quiesce`` they are compared
        return CollectivesWire(group, ranks, torch.device("cpu"))
    choice: Any = "shared_memory" if name == "shared_memory view" else name
    wire = choose_wire(choice, group=group, ranks=ranks, device=torch.device("cpu")).wire
    if name == "shared_memory view":
        wire.name = name
    return wire


def calls(wire: Wire, primitive: str, numel: int) -> Callable[[Label], None]:
    world = wire.group_size
    if primitive == "all_gather":
        shard = wire.empty(numel, torch.float32, BufferRole.SHARD).zero_()
        full = wire.full_view(shard) if wire.name == "shared_memory view" else None
        target = torch.empty(numel * world) if full is None else full
        return lambda label: wire.all_gather(target, shard, label).wait()
    if primitive == "reduce_scatter":
        source = wire.empty(numel * world, torch.float32, BufferRole.GRAD_FULL).zero_()
        part = wire.empty(numel, torch.float32, BufferRole.GRAD_SHARD)
        return lambda label: wire.reduce_scatter(part, source, label).wait()
    if primitive == "quiesce":
        return lambda label: wire.quiesce()
    tensor = wire.empty(numel * world, torch.float32, BufferRole.GRAD_SHARD).zero_()
    return lambda label: wire.all_reduce(tensor, label).wait()


if __name__ == "__main__":
    main()
