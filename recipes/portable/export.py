"""From a checkpoint to a model folder that others load: tensor by tensor, piece by piece, into a temporary folder.

In memory at any moment: one piece of ``_PIECE_NUMEL`` elements, or one whole tensor where it is stored transposed or
lies in another order of dimensions. Never the model; the optimizer's state is not read.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from recipes.checkpoint.manifest import BUFFER, MODEL, Manifest
from recipes.checkpoint.reader import CheckpointReader, dtype_of
from recipes.data.files import expanded
from recipes.data.records import DataInfo
from recipes.portable.errors import FolderError
from recipes.portable.families import Family, Place, SpecialIds, family_of
from recipes.portable.folder import CONFIG_FILE, GENERATION_FILE, INDEX_FILE, SINGLE_FILE
from recipes.portable.tensors import DTYPE_NAMES, write_file
from recipes.portable.tokenizer_files import write_tokenizer
from recipes.schema.actions import ExportConfig
from recipes.schema.model import ModelConfig

_PIECE_NUMEL = 4 << 20  # elements read and written at once
_ROOM_BYTES = 16 << 20  # beside the tensors: config, index, tokenizer


@dataclass(frozen=True)
class Exported:
    """What was written. notes: for people."""

    folder: Path
    num_tensors: int
    num_bytes: int
    num_files: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Leaving:
    """One tensor on its way out. name: in the checkpoint. dtype, shape: as it is written."""

    name: str
    place: Place
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def export(checkpoint: Path, model: ModelConfig, info: DataInfo | None, options: ExportConfig) -> Exported:
    """Write ``options.dir``, which must be new or empty; it appears when it is whole.

    info: of the data, for the tokenizer and the tokens that end a text; None for models of other things.

    Raises:
        FolderError: the folder cannot be written. CheckpointError: the checkpoint cannot be read.
    """
    assert options.dir is not None
    out, reader, family = expanded(options.dir).absolute(), CheckpointReader(checkpoint), family_of(model)
    reader.verify()
    leaving = _leaving(reader, family, options.dtype)
    total = sum(tensor.num_bytes for tensor in leaving)
    with _new_folder(out, total + _ROOM_BYTES) as folder:
        num_files = _write_tensors(folder, reader, leaving, options.max_file_bytes)
        dtypes = {tensor.dtype for tensor in leaving if tensor.dtype.is_floating_point}
        notes = _write_words(folder, reader.manifest, family, info, dtypes)
    return Exported(out, len(leaving), total, num_files, notes)


def _leaving(reader: CheckpointReader, family: Family, dtype: str) -> list[_Leaving]:
    """Parameters and buffers, each once: tied ones have several names with the same pieces."""
    found, seen = [], set()
    for name in [*reader.names(MODEL), *reader.names(BUFFER)]:
        spec, place = reader.spec(name), family.place(name)
        if place is None or (spec.pieces and spec.pieces in seen):
            continue
        seen.add(spec.pieces)
        own = dtype_of(spec)
        is_cast = dtype != "as_saved" and own.is_floating_point
        found.append(_Leaving(name, place, getattr(torch, dtype) if is_cast else own, place.shape(spec.shape)))
    return found


def _write_tensors(folder: Path, reader: CheckpointReader, leaving: list[_Leaving], max_file_bytes: int) -> int:
    """The safetensors files, and their index where there are several; how many."""
    groups = _groups(leaving, max_file_bytes)
    width, files = len(str(len(groups))), [SINGLE_FILE]
    if len(groups) > 1:
        count = f"{len(groups):0{max(5, width)}d}"
        files = [f"model-{number:0{len(count)}d}-of-{count}.safetensors" for number in range(1, len(groups) + 1)]
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in leaving)},
            "weight_map": {t.place.name: file for file, group in zip(files, groups, strict=True) for t in group},
        }
        _write_json(folder / INDEX_FILE, index)
    for file, group in zip(files, groups, strict=True):
        ordered = sorted(group, key=lambda tensor: -tensor.dtype.itemsize)  # wide elements first: all are aligned
        shapes = {tensor.place.name: (DTYPE_NAMES[tensor.dtype], tensor.shape) for tensor in ordered}
        write_file(folder / file, shapes, (piece for tensor in ordered for piece in _pieces(reader, tensor)))
    return len(files)


def _groups(leaving: list[_Leaving], max_file_bytes: int) -> list[list[_Leaving]]:
    """In order, as many in a file as fit; a tensor larger than a file has one of its own."""
    groups: list[list[_Leaving]] = [[]]
    room = max_file_bytes
    for tensor in leaving:
        if groups[-1] and tensor.num_bytes > room:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(tensor)
        room -= tensor.num_bytes
    return groups


def _pieces(reader: CheckpointReader, tensor: _Leaving) -> Iterator[Tensor]:
    """The tensor row by row as it is stored in the folder, 1-D pieces."""
    spec = reader.spec(tensor.name)
    if tensor.place.is_transposed or spec.stride is not None:
        whole = reader.whole(tensor.name)
        yield (whole.t() if tensor.place.is_transposed else whole).to(tensor.dtype).reshape(-1)
        return
    for start in range(0, spec.numel, _PIECE_NUMEL):
        yield reader.span(tensor.name, start, min(start + _PIECE_NUMEL, spec.numel)).to(tensor.dtype)


def _write_words(
    folder: Path, manifest: Manifest, family: Family, info: DataInfo | None, dtypes: set[torch.dtype]
) -> tuple[str, ...]:
    """config.json, generation_config.json and the tokenizer's files; notes for people."""
    special = SpecialIds() if info is None else SpecialIds(info.pad_id, info.eos_id)
    shapes = {name: spec.shape for name, spec in manifest.tensors.items() if spec.kind == MODEL}
    dtype = {"dtype": str(dtypes.pop()).removeprefix("torch.")} if len(dtypes) == 1 else {}
    _write_json(folder / CONFIG_FILE, family.config(shapes, special) | dtype)
    generation = family.generation(special)
    if generation is not None:
        _write_json(folder / GENERATION_FILE, generation)
    notes = [family.note] if family.note else []
    if info is not None and "tokenizer" in info.extras:
        notes += write_tokenizer(folder, info)
    return tuple(notes)


@contextmanager
def _new_folder(out: Path, num_bytes: int) -> Iterator[Path]:
    """A temporary folder beside ``out`` that takes its name at the end of the block, or is gone."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            what = "holds something already" if out.is_dir() else "is a file"
            raise FolderError(f"export.dir={out}: {what}; expected a new or an empty folder. Name another, or empty it")
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < num_bytes:
            raise FolderError(
                f"export.dir={out}: the model takes {num_bytes:,} bytes and {free:,} are free there. Make room, name "
                "a folder on another file system, or write half as many bytes with export.dtype=bfloat16"
            )
        partial = out.parent / f".{out.name}.exporting.{secrets.token_hex(4)}"
        partial.mkdir()
        try:
            yield partial
            os.rename(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # gone already if it has its name
    except OSError as error:
        raise FolderError(
            f"export.dir={out}: cannot be written: {error.strerror or error}; nothing was left behind. "
            "Name a folder that can be written, on a file system with space left"
        ) from error


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
