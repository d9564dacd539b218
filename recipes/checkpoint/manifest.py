"""``manifest.json``: what a checkpoint holds and in which file. Plain data, no torch.

A tensor is stored as pieces, half-open spans of its elements in memory order, each under a key of one safetensors
file. Together the pieces are the tensor: no gap, no overlap. ``stride`` is null where memory order is row-major.

Names of tensors: a parameter's or buffer's own; ``optimizer/<number>/<key>/<parameter>`` for what optimizer ``number``
keeps; ``rank/<rank>/...`` for what belongs to one rank (random generators, buffers that differ from rank 0's).
Tied parameters appear under every name, with the same pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recipes.checkpoint.errors import DamagedCheckpoint
from recipes.checkpoint.folder import MANIFEST, look_at

VERSION = 1
MODEL, BUFFER, OPTIMIZER, RANK = "model", "buffer", "optimizer", "rank"


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` of a tensor: ``key`` of ``file``."""

    file: str
    key: str
    start: int
    stop: int


@dataclass(frozen=True)
class TensorSpec:
    """kind: model (parameters), buffer, optimizer or rank. dtype: torch's name, as ``bfloat16``."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    pieces: tuple[Piece, ...] = ()

    @property
    def numel(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True)
class FileRecord:
    """Length and checksum of one file."""

    bytes: int
    checksum: str


@dataclass(frozen=True)
class GroupRecord:
    """One parameter group. params: original names. settings: its plain values at the save. built: those it was made
    with, from the config: where both runs were made with the same, the saved ones go on."""

    params: list[str]
    settings: dict[str, Any]
    built: dict[str, Any]


@dataclass(frozen=True)
class OptimizerRecord:
    """kind: class of the optimizer. values: its state that is no tensor, by parameter and key."""

    kind: str
    groups: list[GroupRecord]
    values: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The whole of it. shared: the run's own state, equal on all ranks. per_rank: plain values of each rank.
    extra: what modules with an extra state gave, by name. tensor_bytes follows from the files."""

    step: int
    world_size: int
    attempt: int
    tensors: dict[str, TensorSpec]
    files: dict[str, FileRecord]
    optimizers: list[OptimizerRecord]
    config: dict[str, Any]
    shared: dict[str, Any]
    per_rank: list[dict[str, Any]]
    extra: dict[str, Any] = field(default_factory=dict)
    eval_loss: float | None = None
    version: int = VERSION

    def as_json(self) -> bytes:
        return (json.dumps(asdict(self), separators=(",", ":")) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Of a complete checkpoint.

    Raises:
        DamagedCheckpoint: the folder is incomplete, or the manifest is not what was written.
    """
    look_at(folder)
    path = folder / MANIFEST
    try:
        tree = json.loads(path.read_bytes())
        if tree["version"] != VERSION:
            raise DamagedCheckpoint(
                f"{path}: written in version {tree['version']} of the format; this program reads version {VERSION}"
            )
        return manifest_from(tree)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DamagedCheckpoint):
            raise
        raise DamagedCheckpoint(f"{path}: not a manifest of this format ({error!r})") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: cannot be read: {error.strerror or error}") from None


def manifest_from(tree: dict[str, Any]) -> Manifest:
    facts = dict(tree)
    facts["tensors"] = {name: tensor_from(one) for name, one in tree["tensors"].items()}
    facts["files"] = {name: FileRecord(**one) for name, one in tree["files"].items()}
    facts["optimizers"] = [
        OptimizerRecord(one["kind"], [GroupRecord(**group) for group in one["groups"]], one["values"])
        for one in tree["optimizers"]
    ]
    return Manifest(**facts)


def tensor_from(tree: dict[str, Any]) -> TensorSpec:
    return TensorSpec(
        tree["kind"],
        tree["dtype"],
        tuple(tree["shape"]),
        None if tree["stride"] is None else tuple(tree["stride"]),
        tuple(Piece(**piece) for piece in tree["pieces"]),
    )


def joined(tensors: Iterable[tuple[str, TensorSpec]]) -> dict[str, TensorSpec]:
    """The same tensor from several ranks as one, its pieces in order.

    Raises:
        ValueError: ranks disagree on a tensor, or its pieces leave a gap or overlap.
    """
    found: dict[str, TensorSpec] = {}
    pieces: dict[str, list[Piece]] = {}
    for name, spec in tensors:
        first = found.setdefault(name, spec)
        if (first.kind, first.dtype, first.shape, first.stride) != (spec.kind, spec.dtype, spec.shape, spec.stride):
            raise ValueError(f"ranks hold '{name}' in different forms: {describe(first)} and {describe(spec)}")
        pieces.setdefault(name, []).extend(spec.pieces)
    whole = {}
    for name, spec in found.items():
        ordered = sorted(pieces[name], key=lambda piece: piece.start)
        position = 0
        for piece in ordered:
            if piece.start != position:
                raise ValueError(f"the pieces of '{name}' do not meet: elements [{position}, {piece.start})")
            position = piece.stop
        if position != spec.numel:
            raise ValueError(f"no rank wrote elements [{position}, {spec.numel}) of '{name}'")
        whole[name] = TensorSpec(spec.kind, spec.dtype, spec.shape, spec.stride, tuple(ordered))
    return whole


def describe(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
