"""``model.init_from``: a model folder's values straight into the shards, each rank reading what it holds.

A parameter's span is read from the mapped file, converted and copied into the shard: beside the shards no more than
one rank's part of one tensor is in memory (of a matrix that the folder stores transposed: a copy of that part).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core.layout.flat_layout import contiguous_stride
from fsdp_core.state.held_parts import HeldPart
from recipes.checkpoint.parts import own_shards
from recipes.data.errors import listed
from recipes.models.own_shards import TableShard
from recipes.portable.errors import FolderError
from recipes.portable.families import Family, Place, family_of
from recipes.portable.folder import ModelFolder, open_folder
from recipes.portable.tensors import mapped
from recipes.schema.model import ModelConfig

_KEY = "model.init_from"


def init_from(model: nn.Module, config: ModelConfig) -> None:
    """Fill ``model``, sharded already, from ``config.init_from``. Every rank calls.

    Raises:
        FolderError: names everything that is missing, left over or of another shape; nothing has been written then.
    """
    assert config.init_from is not None
    folder, family = open_folder(config.init_from), family_of(config)
    own = own_shards(model)
    left_out = list(own.values())
    held = fsdp_core.held_model(model, left_out)
    shapes = {part.name: part.shape for part in held.parts}
    names = {first: (first, *(alias for alias, one in held.aliases.items() if one == first)) for first in shapes}
    tables = {f"{name}.{shard.name}": shard for name, module in own.items() for shard in module.shards()}
    shapes |= {name: shard.shape for name, shard in tables.items()}
    places = {name: _place(family, folder, names.get(name, (name,))) for name in shapes}
    _check(folder, family, shapes, places, config)

    def source(part: HeldPart) -> Tensor:
        return _elements(folder, places[part.name], part)

    fsdp_core.fill_model(model, source, left_out)
    with torch.no_grad():
        for name, shard in tables.items():
            _fill_rows(folder, places[name], shard)


def _place(family: Family, folder: ModelFolder, names: tuple[str, ...]) -> Place:
    """Of a parameter with these names (several, if it is tied): the first that has a place."""
    for name in names:
        place = family.place(name)
        if place is not None:
            return family.found(place, folder.tensors)
    raise AssertionError(f"no name of {names} has a place")


def _check(
    folder: ModelFolder,
    family: Family,
    shapes: Mapping[str, tuple[int, ...]],
    places: Mapping[str, Place],
    config: ModelConfig,
) -> None:
    """Everything that does not fit, at once, in the folder's names."""
    wanted = {place.name: place.shape(shapes[name]) for name, place in places.items()}
    missing = [name for name in wanted if name not in folder.tensors]
    extra = [name for name in folder.tensors if name not in wanted and not family.is_ignorable(name)]
    shaped = [
        f"{name} {list(folder.tensors[name].shape)} there, {list(shape)} here"
        for name, shape in wanted.items()
        if name in folder.tensors and folder.tensors[name].shape != shape
    ]
    said = (
        ("this model needs, and the folder has not", missing),
        ("the folder has, and this model has not", extra),
        ("of another shape", shaped),
    )
    problems = [f"  {what}: {listed(names)}" for what, names in said if names]
    if problems:
        others = [f"{key} is {theirs} there and {ours} here" for key, theirs, ours in family.differences(folder.config)]
        size = folder.config.get("vocab_size")
        if shaped and size is not None and getattr(config, "vocab_size", size) is None:
            others.append(f"there are {size} tokens: model.vocab_size={size}")
        hint = f"By its config.json, {'; '.join(others)}" if others else "Choose the model preset of the folder"
        lines = [f"{_KEY}={config.init_from}: the folder's tensors are not those of this model", *problems, hint]
        raise FolderError("\n".join(lines))


def _elements(folder: ModelFolder, place: Place, part: HeldPart) -> Tensor:
    """This rank's elements ``[start, end)`` of the part, 1-D in its memory order."""
    stored = mapped(folder.tensors[place.name])
    if part.stride != contiguous_stride(part.shape):  # kept in another order of dimensions
        ours = stored.t() if place.is_transposed else stored
        ordered = torch.empty_strided(part.shape, part.stride, dtype=stored.dtype).copy_(ours)
        return ordered.as_strided((ordered.numel(),), (1,))[part.start : part.end]
    if not place.is_transposed or part.start == part.end:
        return stored.reshape(-1)[part.start : part.end]
    width = part.shape[1]
    first, last = part.start // width, -(-part.end // width)  # our rows, the folder's columns
    rows = stored[:, first:last].t().reshape(-1)
    return rows[part.start - first * width : part.end - first * width]


def _fill_rows(folder: ModelFolder, place: Place, shard: TableShard) -> None:
    stored = mapped(folder.tensors[place.name])
    shard.values.copy_(stored[shard.start : shard.stop])
