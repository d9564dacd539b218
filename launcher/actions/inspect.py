"""``action=inspect``: what a checkpoint holds, from its manifest alone. No tensor is loaded, and no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import yaml

from launcher.actions.which import chosen
from launcher.errors import EXIT_OK, ConfigErrors, Problem
from launcher.request import LaunchRequest
from launcher.schema import Config
from launcher.streams import visible
from recipes.checkpoint.checksum import checksum_of_file
from recipes.checkpoint.errors import CheckpointError
from recipes.checkpoint.folder import Found
from recipes.checkpoint.manifest import MODEL, Manifest, TensorSpec, read_manifest

# Bytes of one element, by torch's names; anything else is read off the files' sizes only.
_BYTES = {"64": 8, "32": 4, "16": 2, "8": 1, "bool": 1, "8_e4m3fn": 1, "8_e5m2": 1}


def run(config: Config, request: LaunchRequest) -> int:
    found = chosen(config.checkpoint.resume, config.run.dir)
    try:
        manifest = read_manifest(found.path)
        print(visible("\n".join(lines(found, manifest))))
        if config.inspect.verify:
            for line in verify(found, manifest):
                print(visible(line), flush=True)
    except CheckpointError as error:
        raise ConfigErrors([Problem(str(error), "checkpoint.resume", str(found.path))]) from None
    return EXIT_OK


def lines(found: Found, manifest: Manifest) -> Iterator[str]:
    """A heading, one table of tensors, one of files, and the config."""
    loss = "" if manifest.eval_loss is None else f", held-out loss {manifest.eval_loss:.4f}"
    yield f"checkpoint  {found.path}"
    yield f"step        {manifest.step}{loss}"
    yield f"saved by    {manifest.world_size} ranks, attempt {manifest.attempt}"
    yield from _sums(manifest)
    yield ""
    rows = [
        (name, spec.kind, spec.dtype, _shape(spec.shape), f"{num_bytes(spec):,}", str(len(spec.pieces)))
        for name, spec in manifest.tensors.items()
    ]
    yield from _table(("tensor", "kind", "dtype", "shape", "bytes", "pieces"), rows)
    yield ""
    files = [(name, f"{record.bytes:,}", record.checksum) for name, record in manifest.files.items()]
    yield from _table(("file", "bytes", "checksum"), files)
    yield ""
    yield "config:"
    yield yaml.safe_dump(manifest.config, sort_keys=False, allow_unicode=True, width=120).rstrip()


def verify(found: Found, manifest: Manifest) -> Iterator[str]:
    """One line per file that is as it was written.

    Raises:
        CheckpointError: the first that is not.
    """
    for name, record in manifest.files.items():
        path = found.path / name
        try:
            there = checksum_of_file(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
        if there != record.checksum:
            raise CheckpointError(f"{path}: damaged: its checksum is {there}, {record.checksum} was written")
        yield f"checksum of {name}: as written"


def num_bytes(spec: TensorSpec) -> int:
    return spec.numel * _BYTES.get(spec.dtype.lstrip("abcdefghijklmnopqrstuvwxyz") or spec.dtype, 1)


def _sums(manifest: Manifest) -> Iterator[str]:
    """Tensors, elements and bytes by kind; tied names count once."""
    counts, numels, sizes = Counter[str](), Counter[str](), Counter[str]()
    seen = set()
    for spec in manifest.tensors.values():
        if spec.pieces and spec.pieces in seen:
            continue
        seen.add(spec.pieces)
        counts[spec.kind] += 1
        numels[spec.kind] += spec.numel
        sizes[spec.kind] += num_bytes(spec)
    for kind in sorted(counts, key=lambda kind: (kind != MODEL, kind)):
        yield f"{kind:<12}{counts[kind]} tensors, {numels[kind]:,} elements, {sizes[kind]:,} bytes"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
