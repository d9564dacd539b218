"""All tensors that a run's state consists of, as this rank holds them; and which rank writes what.

========================  ====================================================  ================================
state                     held by                                               written by
========================  ====================================================  ================================
parameters                F ranks, a span each; W/F ranks hold the same span    those W/F ranks, a part each
their optimizer state     as the parameters                                     as the parameters
state of whole            every rank (Adafactor's sums), or the owner and its   those ranks, a part each
parameters                replicas (``WholeParameterOptimizer``)
step counts               every rank                                            all ranks, a part each
buffers                   every rank, perhaps different (see ``rank_state``)    rank 0
tables of ``OwnShards``   one rank, whole rows                                  that rank
========================  ====================================================  ================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core.layout.flat_layout import contiguous_stride
from fsdp_core.state.held_parts import HeldPart
from recipes.checkpoint.manifest import BUFFER, MODEL, OPTIMIZER
from recipes.models.own_shards import OwnShards, TableShard
from recipes.step import Trainee


@dataclass(frozen=True, eq=False)
class Part:
    """Elements ``[start, stop)`` of the tensor ``name``: ``values``, 1-D, a live view. holders: the ranks that write
    them. stride: null where memory order is row-major."""

    name: str
    kind: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    start: int
    stop: int
    values: Tensor
    holders: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.values.itemsize


@dataclass
class State:
    """parts: in an order that all holders of the same elements share. values: per optimizer, state that is no tensor.
    groups: per optimizer, the names in each group. aliases: further names of tied parameters. extra: modules with an
    extra state, by name."""

    parts: list[Part] = field(default_factory=list)
    values: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    groups: list[list[list[str]]] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    extra: dict[str, nn.Module] = field(default_factory=dict)


def state_of(trainee: Trainee) -> State:
    """Everything but the run's own numbers. No communication, no copies."""
    own, rank = own_shards(trainee.model), trainee.ranks.rank
    held = fsdp_core.held_model(trainee.model, left_out=list(own.values()))
    state = State(aliases=held.aliases, extra=held.extra)
    for one in held.parts:
        part = _part(one.name, BUFFER if one.name in held.buffers else MODEL, one)
        state.parts.append(replace(part, holders=(0,)) if part.kind == BUFFER else part)
    for name, module in own.items():
        state.parts += [table_part(f"{name}.{shard.name}", MODEL, shard, rank) for shard in module.shards()]
    for number, optimizer in enumerate(trainee.optimizers):
        _add_optimizer(state, trainee, number, optimizer, own)
    return state


def own_shards(model: nn.Module) -> dict[str, OwnShards]:
    return {name: module for name, module in model.named_modules() if isinstance(module, OwnShards)}


def optimizer_name(number: int, key: str, parameter: str) -> str:
    return f"optimizer/{number}/{key}/{parameter}"


def own_share(parts: Iterable[Part], rank: int) -> list[Part]:
    """What ``rank`` writes: the bytes of parts with the same holders, laid end to end, are cut into equal runs, one
    for each holder. Every element is written by exactly one rank; cuts fall between elements."""
    by_holders: dict[tuple[int, ...], list[Part]] = {}
    for part in parts:
        if rank in part.holders:
            by_holders.setdefault(part.holders, []).append(part)
    mine = []
    for holders, same in by_holders.items():
        total, place = sum(part.num_bytes for part in same), holders.index(rank)
        first, last = total * place // len(holders), total * (place + 1) // len(holders)
        offset = 0
        for part in same:
            cut = _between(part, first - offset, last - offset)
            if cut.stop > cut.start or (place == 0 and not torch.Size(part.shape).numel()):
                mine.append(cut)  # empty tensors have no pieces, but a name and a shape
            offset += part.num_bytes
    return mine


def _between(part: Part, first: int, last: int) -> Part:
    """The elements of ``part`` whose first byte lies in ``[first, last)`` of it."""
    count, size = part.stop - part.start, part.values.itemsize
    start, stop = (min(max(-(-position // size), 0), count) for position in (first, last))
    return replace(part, start=part.start + start, stop=part.start + stop, values=part.values[start:stop])


def _part(name: str, kind: str, held: HeldPart) -> Part:
    stride = None if held.stride == contiguous_stride(held.shape) else held.stride
    return Part(name, kind, held.shape, stride, held.start, held.end, held.values, held.holders)


def table_part(name: str, kind: str, shard: TableShard, rank: int) -> Part:
    per_row = torch.Size(shard.shape[1:]).numel()
    values = shard.values.detach().view(-1)
    return Part(name, kind, shard.shape, None, shard.start * per_row, shard.stop * per_row, values, (rank,))


def _add_optimizer(
    state: State, trainee: Trainee, number: int, optimizer: torch.optim.Optimizer, own: dict[str, OwnShards]
) -> None:
    tables = {name: list(module.parameters(recurse=False)) for name, module in own.items()}
    left_out = [parameter for parameters in tables.values() for parameter in parameters]
    held = fsdp_core.held_optimizer(trainee.model, optimizer, left_out)
    state.groups.append(held.groups)
    state.values.append(held.values)
    state.parts += [_part(optimizer_name(number, one.key, one.name), OPTIMIZER, one) for one in held.parts]
    everyone = tuple(range(trainee.ranks.world_size))
    for name, parameters in tables.items():
        for parameter in parameters:
            for key, value in optimizer.state.get(parameter, {}).items():
                if is_per_row(value, parameter):
                    for shard in own[name].shards_like(value):
                        full = optimizer_name(number, key, f"{name}.{shard.name}")
                        state.parts.append(table_part(full, OPTIMIZER, shard, trainee.ranks.rank))
                elif isinstance(value, Tensor):
                    flat = value.detach().reshape(-1)
                    full = optimizer_name(number, key, name)
                    shape = tuple(value.shape)
                    state.parts.append(Part(full, OPTIMIZER, shape, None, 0, flat.numel(), flat, everyone))
                else:
                    held.values.setdefault(name, {})[key] = value


def is_per_row(value: Any, parameter: Tensor) -> bool:
    """Whether a table's optimizer state has one entry per local row."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == parameter.shape[0]
