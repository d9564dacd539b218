"""The safetensors file of one rank, written straight from memory: eight bytes, a header in JSON, the elements.

Written here and not by the safetensors library so that no second copy of the elements is made and the checksum comes
with the writing; tests read every file back with that library. Wide elements come first: all of them are aligned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.checkpoint.checksum import CHUNK_BYTES
from recipes.checkpoint.errors import CheckpointError

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


@dataclass(frozen=True, eq=False)
class Entry:
    """One tensor of the file, 1-D and contiguous, on any device."""

    key: str
    values: Tensor

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.itemsize


def in_file_order(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: -entry.values.itemsize)


def header_of(entries: Sequence[Entry]) -> bytes:
    """Of entries in file order. Raises CheckpointError for a dtype that the format does not have."""
    header, offset = {}, 0
    for entry in entries:
        code = CODES.get(entry.values.dtype)
        if code is None:
            raise CheckpointError(f"a checkpoint cannot hold {entry.key}: safetensors has no {entry.values.dtype}")
        stop = offset + entry.num_bytes
        header[entry.key] = {"dtype": code, "shape": [entry.values.numel()], "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def chunks_of(entries: Sequence[Entry]) -> Iterator[bytes | memoryview]:
    """The whole file, of entries in file order. On a device, one entry at a time is copied to the host."""
    yield header_of(entries)
    for entry in entries:
        data = bytes_of(entry.values)
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


def bytes_of(values: Tensor) -> memoryview:
    """The elements as they lie in memory (little-endian on every machine torch runs on); a view on the CPU."""
    if not values.numel():
        return memoryview(b"")
    return values.detach().cpu().contiguous().view(torch.uint8).numpy().data
