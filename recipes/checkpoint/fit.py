"""Does a checkpoint fit this model and these optimizers? All that does not is told at once, before any change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

import fsdp_core
from fsdp_core.optimizers import WholeParameterOptimizer
from recipes.checkpoint.manifest import BUFFER, MODEL
from recipes.checkpoint.parts import own_shards
from recipes.checkpoint.reader import CheckpointReader
from recipes.data.errors import listed


def model_problems(reader: CheckpointReader, model: nn.Module) -> list[str]:
    """Names and shapes; empty where it fits. The same on every rank."""
    shapes, saved = (
        model_shapes(model),
        {name: reader.spec(name) for name in reader.names() if _is_of_model(reader, name)},
    )
    held = fsdp_core.held_model(model, left_out=list(own_shards(model).values()))
    missing = [name for name in shapes if name not in saved] + [n for n in held.extra if n not in reader.manifest.extra]
    surplus = [name for name in saved if name not in shapes]
    others = [
        f"{name} {list(saved[name].shape)} there, {list(shape)} here"
        for name, shape in shapes.items()
        if name in saved and saved[name].shape != shape
    ]
    untied = [
        f"{name} and {first}"
        for name, first in held.aliases.items()
        if name in saved and first in saved and saved[name].pieces != saved[first].pieces
    ]
    said = (
        ("this model needs, and the checkpoint has not", missing),
        ("the checkpoint has, and this model has not", surplus),
        ("of another shape", others),
        ("one parameter here, two in the checkpoint", untied),
    )
    return [f"{what}: {listed(names)}" for what, names in said if names]


def model_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of all parameters and buffers under every name, and of tables: what a checkpoint of this model holds."""
    own = own_shards(model)
    held = fsdp_core.held_model(model, left_out=list(own.values()))
    shapes = {part.name: part.shape for part in held.parts}
    shapes.update({alias: shapes[first] for alias, first in held.aliases.items()})
    for name, module in own.items():
        shapes.update({f"{name}.{shard.name}": shard.shape for shard in module.shards()})
    return shapes


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Its class, and the one it wraps."""
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if isinstance(optimizer, WholeParameterOptimizer):
        return f"{name}({kind_of(optimizer.wrapped)})"
    return name


def optimizer_problems(
    reader: CheckpointReader, optimizers: Sequence[torch.optim.Optimizer], groups: Sequence[list[list[str]]]
) -> list[str]:
    """Kinds and groups; empty where they fit. groups: of each optimizer, the names in each of its groups."""
    saved = reader.manifest.optimizers
    if len(saved) != len(optimizers):
        return [f"{len(saved)} optimizers there, {len(optimizers)} here"]
    problems = []
    for number, (record, optimizer, names) in enumerate(zip(saved, optimizers, groups, strict=True)):
        if record.kind != kind_of(optimizer):
            problems.append(f"optimizer {number} is {record.kind} there, {kind_of(optimizer)} here")
        elif [sorted(group.params) for group in record.groups] != [sorted(group) for group in names]:
            sizes = [len(group.params) for group in record.groups], [len(group) for group in names]
            problems.append(
                f"optimizer {number} groups its parameters otherwise: {sizes[0]} names a group there, {sizes[1]} here"
            )
    return problems


def _is_of_model(reader: CheckpointReader, name: str) -> bool:
    return reader.spec(name).kind in (MODEL, BUFFER)
