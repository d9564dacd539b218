"""From a checkpoint into a running model and its optimizers: any W, F, RAF, units. Each rank reads its own spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core.layout.flat_layout import contiguous_stride
from fsdp_core.numerics.optimizers.geometry import Piece
from fsdp_core.state.held_parts import HeldPart
from recipes.checkpoint.manifest import OPTIMIZER, GroupRecord
from recipes.checkpoint.parts import optimizer_name, own_shards
from recipes.checkpoint.reader import CheckpointReader, dtype_of
from recipes.models.own_shards import OwnShards, TableShard


def load_model(reader: CheckpointReader, model: nn.Module) -> None:
    """Parameters, buffers, tables and extra states; ``fit.model_problems`` must have found nothing. Collective.

    Values of another dtype are converted. Buffers are rank 0's; ``load_rank_buffers`` comes after, if it fits.
    """
    own = own_shards(model)

    def source(part: HeldPart) -> Tensor:
        return elements(reader, part.name, part.shape, part.stride, part.start, part.end)

    fsdp_core.fill_model(model, source, left_out=list(own.values()))
    for name, module in fsdp_core.held_model(model, left_out=list(own.values())).extra.items():
        module.set_extra_state(reader.manifest.extra[name])
    with torch.no_grad():
        for name, owner in own.items():
            for shard in owner.shards():
                read_rows(reader, f"{name}.{shard.name}", shard)


def load_optimizer(reader: CheckpointReader, model: nn.Module, number: int, optimizer: torch.optim.Optimizer) -> None:
    """State of one optimizer; ``fit.optimizer_problems`` must have found nothing."""
    own = own_shards(model)
    left_out = [parameter for module in own.values() for parameter in module.parameters(recurse=False)]
    source = OptimizerSource(reader, number)
    fsdp_core.fill_optimizer(model, optimizer, source, left_out)
    for name, module in own.items():
        (table,) = module.parameters(recurse=False)
        if any(table is parameter for group in optimizer.param_groups for parameter in group["params"]):
            _load_table_state(source, optimizer, table, name, module)


def take_settings(optimizer: torch.optim.Optimizer, built: Sequence[dict[str, Any]], saved: list[GroupRecord]) -> None:
    """Settings of each group, as they were at the save, where both runs were built with the same value: they may
    have moved since. A setting that the config gives another value now keeps the new one."""
    for group, made, record in zip(optimizer.param_groups, built, saved, strict=True):
        for key, value in record.settings.items():
            if key in made and made[key] == record.built.get(key):
                group[key] = tuple(value) if isinstance(group[key], tuple) else value


class OptimizerSource:
    """What optimizer ``number`` of a checkpoint kept, as ``fsdp_core.fill_optimizer`` wants it."""

    def __init__(self, reader: CheckpointReader, number: int) -> None:
        self._reader, self._number = reader, number
        self._values = reader.manifest.optimizers[number].values
        self._tensors: dict[str, dict[str, tuple[int, ...]]] = {}
        for name in reader.names(OPTIMIZER):
            _, saved, key, parameter = name.split("/", 3)
            if int(saved) == number:
                self._tensors.setdefault(parameter, {})[key] = reader.spec(name).shape

    def names(self) -> set[str]:
        """Of parameters and tables with any state."""
        return {*self._tensors, *self._values}

    def tensors(self, name: str) -> Mapping[str, tuple[int, ...]]:
        return self._tensors.get(name, {})

    def values(self, name: str) -> Mapping[str, Any]:
        return self._values.get(name, {})

    def part(self, name: str, key: str, piece: Piece) -> Tensor:
        full = optimizer_name(self._number, key, name)
        return elements(self._reader, full, piece.shape, piece.stride, piece.start, piece.end)

    def whole(self, name: str, key: str) -> Tensor:
        return self._reader.whole(optimizer_name(self._number, key, name))

    def dtype(self, name: str, key: str) -> torch.dtype:
        return dtype_of(self._reader.spec(optimizer_name(self._number, key, name)))

    def rows(self, table: str, key: str, shard: TableShard) -> None:
        read_rows(self._reader, optimizer_name(self._number, key, table), shard)


def elements(
    reader: CheckpointReader, name: str, shape: tuple[int, ...], stride: tuple[int, ...], start: int, stop: int
) -> Tensor:
    """Elements ``[start, stop)`` in the memory order of ``stride``, 1-D on the CPU, however they were saved."""
    stored = reader.spec(name).stride or contiguous_stride(shape)
    if stored == stride or start == stop:
        return reader.span(name, start, stop)
    ordered = torch.empty_strided(shape, stride, dtype=dtype_of(reader.spec(name))).copy_(reader.whole(name))
    return ordered.as_strided((ordered.numel(),), (1,))[start:stop]


def read_rows(reader: CheckpointReader, name: str, shard: TableShard) -> None:
    """Fill ``shard.values``."""
    per_row = torch.Size(shard.shape[1:]).numel()
    rows = reader.span(name, shard.start * per_row, shard.stop * per_row)
    shard.values.copy_(rows.view(shard.values.shape))


def _load_table_state(
    source: OptimizerSource, optimizer: torch.optim.Optimizer, table: Tensor, name: str, module: OwnShards
) -> None:
    """State with one entry per row, by table; the rest under the module's own name."""
    state: dict[str, Any] = dict(source.values(name))
    state.update({key: source.whole(name, key).to(table.device, copy=True) for key in source.tensors(name)})
    first = f"{name}.{module.shards()[0].name}"  # all tables have the same keys
    for key, shape in source.tensors(first).items():
        like = (table.shape[0], *shape[1:])
        state[key] = torch.zeros(like, dtype=source.dtype(first, key), device=table.device)
        for shard in module.shards_like(state[key]):
            source.rows(f"{name}.{shard.name}", key, shard)
    optimizer.state[table] = state
    if not state:
        optimizer.state.pop(table)
