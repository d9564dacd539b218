"""``CheckpointReader``: any span of any tensor of a checkpoint, read from mapped files, whoever wrote it.

Nothing here unpickles: the manifest is JSON, the tensors are safetensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from recipes.checkpoint.checksum import checksum_of_file
from recipes.checkpoint.errors import CheckpointError, DamagedCheckpoint
from recipes.checkpoint.manifest import Manifest, TensorSpec, read_manifest


class CheckpointReader:
    """A complete checkpoint.

    Tensors it gives live in the mapped file where one piece covers them: nobody may write to them, and reading them
    later is reading the file.

    Raises:
        DamagedCheckpoint: the folder is incomplete, or a file is missing or not as long as it was.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(self.folder)
        self._files: dict[str, Any] = {}
        self._check_sizes()

    def names(self, kind: str | None = None) -> list[str]:
        """Of all tensors, or of one kind, in the order of the manifest."""
        return [name for name, spec in self.manifest.tensors.items() if kind is None or spec.kind == kind]

    def spec(self, name: str) -> TensorSpec:
        """Raises CheckpointError where the checkpoint has no such tensor."""
        spec = self.manifest.tensors.get(name)
        if spec is None:
            raise CheckpointError(f"{self.folder}: holds no tensor '{name}'")
        return spec

    def span(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` in memory order, 1-D on the CPU, in the dtype they were saved in."""
        spec = self.spec(name)
        if not 0 <= start <= stop <= spec.numel:
            raise IndexError(f"{name}: elements [{start}, {stop}) of {spec.numel}")
        found = [
            self._entry(
                piece.file, piece.key, max(start, piece.start) - piece.start, min(stop, piece.stop) - piece.start
            )
            for piece in spec.pieces
            if piece.start < stop and piece.stop > start
        ]
        if not found:
            return torch.empty(0, dtype=dtype_of(spec))
        return found[0] if len(found) == 1 else torch.cat(found)

    def whole(self, name: str) -> Tensor:
        """The tensor in its shape."""
        spec = self.spec(name)
        flat = self.span(name, 0, spec.numel)
        return flat.view(spec.shape) if spec.stride is None else flat.as_strided(spec.shape, spec.stride)

    def verify(self, files: Iterable[str] | None = None) -> None:
        """Read ``files`` (null: all), compare their checksums, and see that they hold the pieces the manifest names.

        Raises:
            DamagedCheckpoint: names the first file that is not what was written.
        """
        names = list(self.manifest.files if files is None else files)
        for name in names:
            expected = self.manifest.files[name].checksum
            try:
                found = checksum_of_file(self.folder / name)
            except OSError as error:
                raise _unreadable(self.folder / name, error) from None
            if found != expected:
                raise DamagedCheckpoint(
                    f"{self.folder / name}: its checksum is {found}, {expected} was written: the file was changed on "
                    "the disk or on its way here; use another checkpoint or copy this one again"
                )
        for spec in self.manifest.tensors.values():
            for piece in spec.pieces:
                if piece.file in names:
                    self._entry(piece.file, piece.key, 0, 0)

    def _check_sizes(self) -> None:
        for name, record in self.manifest.files.items():
            path = self.folder / name
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                raise DamagedCheckpoint(f"{path}: missing; the checkpoint was not copied as a whole") from None
            except OSError as error:
                raise _unreadable(path, error) from None
            if size != record.bytes:
                raise DamagedCheckpoint(f"{path}: {size:,} bytes, {record.bytes:,} were written; the file was cut")

    def _entry(self, file: str, key: str, start: int, stop: int) -> Tensor:
        try:
            if file not in self._files:
                self._files[file] = safe_open(self.folder / file, framework="pt")
            return self._files[file].get_slice(key)[start:stop]
        except OSError as error:
            raise _unreadable(self.folder / file, error) from None
        except SafetensorError as error:
            raise DamagedCheckpoint(f"{self.folder / file}: no safetensors file with '{key}' ({error})") from None


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Raises CheckpointError for a name that is no dtype of this torch."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint holds a dtype that this torch does not have: {spec.dtype}")
    return dtype


def _unreadable(path: Path, error: OSError) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path}: cannot be read: {error.strerror or error}")
