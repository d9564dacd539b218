"""From live state to the plain records of the manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from fsdp_core.optimizers import WholeParameterOptimizer
from recipes.checkpoint.errors import CheckpointError
from recipes.checkpoint.fit import kind_of
from recipes.checkpoint.folder import rank_file
from recipes.checkpoint.manifest import GroupRecord, OptimizerRecord, Piece, TensorSpec
from recipes.checkpoint.parts import Part, State
from recipes.checkpoint.safe_file import Entry


def plain(value: Any, what: str) -> Any:
    """A copy as JSON gives it back: tuples are lists. Raises CheckpointError for what is no plain data."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what} cannot be saved: {error}; only tensors, numbers, texts, lists and maps can"
        ) from None


def plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Of a parameter group; what is no plain data (a function, say) belongs to the program and is left out."""
    settings = {}
    for key, value in group.items():
        try:
            settings[key] = plain(value, key) if key != "params" else None
        except CheckpointError:
            continue
    settings.pop("params", None)
    return settings


def optimizer_records(
    optimizers: Sequence[torch.optim.Optimizer], state: State, built: Sequence[list[dict[str, Any]]]
) -> list[OptimizerRecord]:
    """Without ``values``: those come with the reports. built: settings that each group was made with."""
    records = []
    for optimizer, names, made in zip(optimizers, state.groups, built, strict=True):
        groups = [
            GroupRecord(params, plain_settings(group), settings)
            for params, group, settings in zip(names, optimizer.param_groups, made, strict=True)
        ]
        records.append(OptimizerRecord(kind_of(optimizer), groups))
    return records


def entries_of(share: Sequence[Part]) -> list[Entry]:
    """What the rank's file holds; empty tensors are in the manifest only."""
    return [Entry(key_of(part), part.values) for part in share if part.stop > part.start]


def key_of(part: Part) -> str:
    return f"{part.name}[{part.start}:{part.stop}]"


def spec_of(part: Part, rank: int) -> TensorSpec:
    pieces = (Piece(rank_file(rank), key_of(part), part.start, part.stop),) if part.stop > part.start else ()
    return TensorSpec(part.kind, str(part.values.dtype).removeprefix("torch."), part.shape, part.stride, pieces)


def report_of(
    share: Sequence[Part],
    state: State,
    optimizers: Sequence[torch.optim.Optimizer],
    per_rank: dict[str, Any],
    rank: int,
) -> dict[str, Any]:
    """What this rank tells rank 0. State that is no tensor is alike on all ranks, but where parameters have owners."""
    values = [
        plain(
            values if rank == 0 or isinstance(optimizer, WholeParameterOptimizer) else {},
            f"the state of {kind_of(optimizer)}",
        )
        for optimizer, values in zip(optimizers, state.values, strict=True)
    ]
    return {
        "tensors": {part.name: asdict(spec_of(part, rank)) for part in share},
        "per_rank": per_rank,
        "values": values,
    }
