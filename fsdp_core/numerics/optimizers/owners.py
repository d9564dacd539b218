"""Whole parameters in one place: gather what ranks hold, let an owner work on it, give every rank its part back.

Each original parameter has an owner, a rank of the sharding group, chosen so that work is even. A stage gathers a flat
parameter (every rank sees it whole for a moment), the owners compute, and a reduce-scatter of results that are zero
everywhere but at their owner distributes them: x + 0 is x, so nothing is rounded.

Writing parameters is allowed only after ``Wire.quiesce`` and before the next gather; hence ``write_window``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_core.comm.wire import BufferRole, Wire
from fsdp_core.numerics.optimizers.base import LABEL
from fsdp_core.numerics.optimizers.geometry import Holding, Home, Piece


@dataclass(frozen=True, eq=False)
class Owned:
    """One original parameter, where it lies, and the group rank that works on it (0 where it is not sharded)."""

    holding: Holding
    piece: Piece
    owner: int

    @property
    def is_mine(self) -> bool:
        home = self.holding.home
        return home is None or home.wire.group_rank == self.owner


def assign_owners(holdings: Iterable[Holding], cost: Callable[[Piece], float | None]) -> list[Owned]:
    """Give every original parameter to the least loaded rank, the most expensive first; the same on all ranks.

    Args:
        cost: of working on a parameter; ``None`` leaves it out.
    """
    places = [(h, p, c) for h in holdings for p in h.pieces if (c := cost(p)) is not None]
    order = sorted(range(len(places)), key=lambda i: (-places[i][2], i))
    loads: dict[int, list[float]] = {}
    owners = [0] * len(places)
    for index in order:
        holding, _, price = places[index]
        if holding.home is not None:
            load = loads.setdefault(id(holding.home.wire), [0.0] * holding.home.wire.group_size)
            owners[index] = min(range(len(load)), key=load.__getitem__)
            load[owners[index]] += price
    return [Owned(holding, piece, owner) for (holding, piece, _), owner in zip(places, owners, strict=True)]


def by_home(holdings: Iterable[Holding]) -> list[tuple[Home, list[Holding]]]:
    """Holdings of one flat parameter together; those that are not sharded are left out."""
    groups: dict[int, tuple[Home, list[Holding]]] = {}
    for holding in holdings:
        if holding.home is not None:
            groups.setdefault(holding.home.key, (holding.home, []))[1].append(holding)
    return list(groups.values())


def gather(home: Home, parts: Sequence[tuple[Holding, Tensor]], dtype: torch.dtype) -> Tensor:
    """The flat parameter [F * shard_numel] put together from local parts (1-D, one per holding); zeros elsewhere."""
    wire = home.wire
    shard = torch.zeros(home.shard_numel, dtype=parts[0][1].dtype, device=wire.device)
    for holding, part in parts:
        shard[holding.shard_offset : holding.shard_offset + part.numel()].copy_(part)
    full = wire.empty(home.shard_numel * wire.group_size, dtype, BufferRole.FULL)
    wire.all_gather(full, shard, LABEL).wait()
    return full


def scatter(home: Home, results: Sequence[tuple[Piece, Tensor]], dtype: torch.dtype) -> Tensor:
    """This rank's shard of what the owners computed; ``results`` are this rank's own, in original shapes."""
    wire = home.wire
    full = wire.empty(home.shard_numel * wire.group_size, dtype, BufferRole.GRAD_FULL).zero_()
    for piece, result in results:
        piece.whole(full).copy_(result)
    shard = wire.empty(home.shard_numel, dtype, BufferRole.GRAD_SHARD)
    wire.reduce_scatter(shard, full, LABEL).wait()
    return shard


def local_part(holding: Holding, shard: Tensor) -> Tensor:
    """A holding's part of a shard, 1-D, where the holding's own data lies (the CPU, if shards are offloaded)."""
    data = holding.data
    return shard[holding.shard_offset : holding.shard_offset + data.numel()].to(data.device)


def share(wire: Wire, value: Any, owner: int) -> Any:
    """An object of the owner's, on every rank of the group. Every rank calls; only the owner's ``value`` counts."""
    payload = io.BytesIO()
    if wire.group_rank == owner:
        torch.save(value, payload)
    content = torch.frombuffer(bytearray(payload.getvalue() or b"-"), dtype=torch.uint8)
    size = torch.tensor([content.numel()], dtype=torch.int64, device=wire.device)
    wire.broadcast(size, owner, LABEL).wait()
    if wire.group_rank == owner:
        sent = content.to(wire.device)
    else:
        sent = torch.empty(int(size.item()), dtype=torch.uint8, device=wire.device)
    wire.broadcast(sent, owner, LABEL).wait()
    if wire.group_rank == owner:
        return value
    return torch.load(io.BytesIO(bytes(sent.cpu().tolist())), map_location="cpu", weights_only=False)


def write_window(wires: Iterable[Wire]) -> None:
    """After this and until the next gather, ranks may write their parameters. All ranks call it together."""
    for wire in {id(wire): wire for wire in wires}.values():
        wire.quiesce()
