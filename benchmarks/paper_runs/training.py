"""Sharded training on the ranks of an experiment: several models side by side in the same processes, so that settings
can take turns. Everything here but ``turns`` runs on a rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_core
from fsdp_core import GroupPolicy, RateLimit
from fsdp_core.comm.wire import BufferRole
from fsdp_core.describe import ModelReport
from fsdp_core.runtime.find import contexts_in
from paper_runs.decoder import Sizes, build, random_batches, units_of
from paper_runs.ranks import Ranks
from paper_runs.slow_wire import Card, behind


@dataclass(frozen=True)
class Setting:
    """One way to shard. cut: as in ``decoder.units_of``. limit: gathers in flight; 0 has none. rows: who shards with
    whom, by rank; empty: neighbours. slow: behind this rank's slow card."""

    cut: str = "1"
    factor: int | None = None
    reshard: bool = True
    backward_prefetch: bool = True
    forward_prefetch: bool = False
    limit: int = 2
    wire: str = "gloo_p2p"
    buffers: str = "pooled"
    rows: tuple[tuple[int, ...], ...] = ()
    ranks_per_host: int | None = None
    slow: bool = False


@dataclass
class Training:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[Tensor]
    position: int = 0

    def step(self) -> Tensor:
        loss = self.model(self.batches[self.position % len(self.batches)])
        self.position += 1
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


KEPT: dict[str, Training] = {}  # by name, of this rank
CARD = Card()


def shard(model: nn.Module, setting: Setting) -> nn.Module:
    groups = units_of(model, setting.cut)  # type: ignore[arg-type]
    options: dict[str, Any] = {"mesh": DeviceMesh("cpu", setting.rows)} if setting.rows else {}
    with behind(CARD) if setting.slow else nullcontext():
        return fsdp_core.fully_shard(
            model,
            units=GroupPolicy(tuple(groups)) if groups else None,
            sharding_factor=None if setting.rows else setting.factor,
            reshard_after_forward=setting.reshard,
            backward_prefetch=setting.backward_prefetch,
            forward_prefetch=setting.forward_prefetch,
            rate_limit=RateLimit(setting.limit) if setting.limit else RateLimit(kind="unlimited"),
            gather_buffers=setting.buffers,  # type: ignore[arg-type]
            wire=setting.wire,  # type: ignore[arg-type]
            ranks_per_host=setting.ranks_per_host,
            **options,
        )


def start(rank: int, name: str, sizes: Sizes, setting: Setting) -> ModelReport:
    """Build, shard and warm up."""
    model = shard(build(sizes), setting)
    optimizer = torch.optim.AdamW(fsdp_core.flat_parameters(model), lr=1e-4, fused=True)
    KEPT[name] = Training(model, optimizer, random_batches(sizes, rank))
    for _ in range(2):
        KEPT[name].step()
    return fsdp_core.describe(model)


def set_card(rank: int, bytes_per_s: float, latency_s: float) -> None:
    CARD.bytes_per_s, CARD.latency_s, CARD.free_at = bytes_per_s, latency_s, 0.0


def steps(rank: int, name: str, count: int) -> float:
    """Seconds a step; ranks begin together."""
    training = KEPT[name]
    dist.barrier()
    started = time.perf_counter()
    for _ in range(count):
        training.step()
    return (time.perf_counter() - started) / count


@dataclass(frozen=True)
class Watched:
    """Of one step. sent: bytes that left this rank, by primitive; cross: of them, to other hosts. calls: by primitive.
    gathered: the most bytes of gathered parameters at once; buffers: as how many buffers; in_flight: units that the
    limiter counted at once. live: the most bytes in the engine's buffers. shards: parameters that stay."""

    sent: Mapping[str, int]
    cross: int
    calls: Mapping[str, int]
    gathered: int
    buffers: int
    in_flight: int
    live: int
    shards: int
    loss: float


@dataclass
class _Counted:
    nbytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    cross: int = 0


def _counted(model: nn.Module) -> _Counted:
    found = _Counted()
    for primitive, sent in fsdp_core.bytes_sent(model).items():
        found.nbytes[primitive], found.calls[primitive] = sent.nbytes, sent.num_calls
        found.cross += sent.cross_host_bytes
    return found


def watch(rank: int, name: str) -> Watched:
    training = KEPT[name]
    (context,) = contexts_in(training.model)
    pool = context.resources.pool
    pool.peak_live, pool.peak_live_bytes = dict(pool.num_live), pool.live_bytes
    context.limiter.peak_inflight = 0
    before = _counted(training.model)
    log = fsdp_core.start_trace(training.model)
    loss = float(training.step())
    fsdp_core.stop_trace(training.model)
    after = _counted(training.model)
    now = most = 0
    for event in log.events:
        if event.kind in ("gather", "free"):
            now += event.nbytes if event.kind == "gather" else -event.nbytes
            most = max(most, now)
    return Watched(
        sent={kind: nbytes - before.nbytes.get(kind, 0) for kind, nbytes in after.nbytes.items()},
        cross=after.cross - before.cross,
        calls={kind: calls - before.calls.get(kind, 0) for kind, calls in after.calls.items()},
        gathered=most,
        buffers=pool.peak_live.get(BufferRole.FULL, 0),
        in_flight=context.limiter.peak_inflight,
        live=pool.peak_live_bytes,
        shards=sum(handle.sharded.nbytes for _, handle in context.each_handle()),
        loss=loss,
    )


def drop(rank: int, *names: str) -> None:
    for name in names:
        KEPT.pop(name, None)


def turns(ranks: Ranks, names: Sequence[str], rounds: int, count: int) -> dict[str, list[float]]:
    """Seconds a step of the slowest rank, one entry per round; settings take turns in an order that rotates."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            times[name].append(max(ranks.run(steps, name, count)))
    return times
