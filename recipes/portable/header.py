"""What a safetensors file holds, from its header alone: names, dtypes, shapes, places. No torch here.

A file is eight bytes (length of the header, little-endian), the header (JSON), and the tensors' bytes; ``data_offsets``
of the header are half-open and count from the end of the header. Source: the format's README in safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.portable.errors import FolderError

LENGTH_BYTES = 8
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit
METADATA = "__metadata__"
# Bytes of one element, by the format's names.
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: bytes ``[start, stop)`` of ``file``, row by row."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor by name.

    Raises:
        FolderError: the file is no safetensors file, is cut short, or contradicts itself.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        size = file.stat().st_size
        if not 0 < length <= min(LARGEST_HEADER, size - LENGTH_BYTES):
            raise _damaged(file, f"it says that its header has {length} bytes, and the file has {size}")
        text = stream.read(length)
    try:
        header = json.loads(text)
    except ValueError:
        raise _damaged(file, "its header is no JSON") from None
    if not isinstance(header, dict):
        raise _damaged(file, "its header is no map of names")
    data = LENGTH_BYTES + length
    return {name: _entry(file, name, entry, data, size) for name, entry in header.items() if name != METADATA}


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The beginning of a file that holds these (dtype, shape), one after the other in this order."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        stop = offset + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # tensors start at a multiple of eight bytes
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _entry(file: Path, name: str, entry: Any, data: int, size: int) -> StoredTensor:
    try:
        start, stop = entry["data_offsets"]
        found = StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]), data + start, data + stop)
        num_bytes = found.numel * DTYPE_BYTES[found.dtype]
    except (KeyError, TypeError, ValueError):
        raise _damaged(file, f"its header says of {name!r} only {entry!r}") from None
    if not (0 <= start <= stop and stop - start == num_bytes):
        raise _damaged(file, f"{name!r} has {num_bytes} bytes by its shape and {stop - start} by its place")
    if found.stop > size:
        raise _damaged(file, f"{name!r} ends at byte {found.stop}, and the file has {size}")
    return found


def _damaged(file: Path, why: str) -> FolderError:
    return FolderError(
        f"{file} is no whole safetensors file: {why}. Copy it again, or export it again from its checkpoint"
    )
