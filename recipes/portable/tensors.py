"""Values of safetensors files: read as lazy views of the file, written piece by piece. Memory is the caller's."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from recipes.portable.header import StoredTensor, header_bytes

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def mapped(stored: StoredTensor) -> Tensor:
    """The tensor as a view of its file: only what is read of it becomes memory, and only while the view lives.

    A private mapping: whoever writes to it changes neither the file nor what others see.
    """
    dtype = DTYPES[stored.dtype]
    if stored.numel == 0:
        return torch.empty(stored.shape, dtype=dtype)
    page = stored.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with stored.file.open("rb") as stream:
        memory = mmap.mmap(stream.fileno(), stored.stop - page, access=mmap.ACCESS_COPY, offset=page)
    return torch.frombuffer(memory, dtype=dtype, count=stored.numel, offset=stored.start - page).view(stored.shape)


def write_file(file: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]], pieces: Iterable[Tensor]) -> None:
    """A safetensors file of these (dtype, shape).

    pieces: 1-D CPU tensors, in the order of ``shapes``; a tensor may come in any number of pieces. Each is written
    before the next is asked for, so no more than one need exist.
    """
    with file.open("wb") as stream:
        stream.write(header_bytes(shapes))
        expected = stream.tell() + sum(
            DTYPES[dtype].itemsize * torch.Size(shape).numel() for dtype, shape in shapes.values()
        )
        for piece in pieces:
            stream.write(piece.contiguous().view(torch.uint8).numpy().data)
        assert stream.tell() == expected, f"{file}: {stream.tell()} bytes written, the header says {expected}"
