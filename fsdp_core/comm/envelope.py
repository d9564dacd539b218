"""What a collective says about itself: packed, compared between ranks, and explained when ranks disagree.

An envelope is a fixed-size byte string. Two ranks are in the same collective exactly when their envelopes are
equal, so the check is one comparison of bytes; it is only unpacked to write an error.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fsdp_core.comm.wire import Label
from fsdp_core.errors import MismatchError, WireError

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "quiesce")
OPS = ("sum", "max", "min")
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.complex32, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}

# sequence number, elements, unit id, argument (source rank, ordinal of a shard), kind, operation, dtype, phase, unit
_FORMAT = struct.Struct("<QQqqBBB21s104s")
ENVELOPE_BYTES = _FORMAT.size


@dataclass(frozen=True)
class Envelope:
    """One collective as one rank sees it. ``argument``: source of a broadcast, or what else must agree."""

    sequence: int
    kind: str
    label: Label
    numel: int = 0
    dtype: torch.dtype = torch.uint8
    op: str = "sum"
    argument: int = 0

    def pack(self) -> bytes:
        code = _DTYPE_CODE.get(self.dtype)
        if code is None:
            raise WireError(
                f"dtype {self.dtype} cannot travel on this wire",
                unit=self.label.unit or None,
                expected=", ".join(str(dtype) for dtype in _DTYPES),
                got=str(self.dtype),
                remedy="convert the parameter or use wire='collectives'",
            )
        return _FORMAT.pack(
            self.sequence,
            self.numel,
            self.label.unit_id,
            self.argument,
            KINDS.index(self.kind),
            OPS.index(self.op),
            code,
            self.label.phase.encode()[:21],
            _tail(self.label.unit, 104),
        )

    @staticmethod
    def unpack(packed: bytes) -> Envelope:
        sequence, numel, unit_id, argument, kind, op, dtype, phase, unit = _FORMAT.unpack(packed)
        label = Label(unit_id, _text(phase), _text(unit))
        return Envelope(sequence, KINDS[kind], label, numel, _DTYPES[dtype], OPS[op], argument)

    def __str__(self) -> str:
        unit = f"unit {self.label.unit or '<none>'} (id {self.label.unit_id})" if self.label.unit_id >= 0 else "no unit"
        size = f", {self.numel} x {str(self.dtype).removeprefix('torch.')}" if self.kind != "quiesce" else ""
        extra = f", op {self.op}" if self.kind == "all_reduce" else f", argument {self.argument}"
        return f"{self.kind} #{self.sequence} of {unit}, phase {self.label.phase}{size}{extra}"


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _tail(text: str, nbytes: int) -> bytes:
    """The last bytes of a name: the end of a dotted path tells more than its beginning."""
    raw = text.encode()
    return raw if len(raw) <= nbytes else raw[-nbytes:]


def tag_of(packed: bytes) -> int:
    """A 31-bit tag of everything but the sequence number: messages of unlike collectives never meet."""
    return zlib.crc32(packed[8:]) & 0x7FFFFFFF


def mismatch_error(by_rank: Mapping[int, bytes], mine: int) -> MismatchError:
    """The error every rank raises when envelopes differ; ``by_rank``: global rank -> its packed envelope."""
    seen = {rank: Envelope.unpack(packed) for rank, packed in by_rank.items()}
    others = "; ".join(f"rank {rank}: {envelope}" for rank, envelope in sorted(seen.items()) if rank != mine)
    return MismatchError(
        "ranks are in different collectives: they run different units, or the same units in a different order",
        unit=seen[mine].label.unit or None,
        expected=f"rank {mine}: {seen[mine]}",
        got=others,
        remedy="make every rank of the group use the same units in the same order (a branch that depends on the "
        "rank's data is the usual cause; ranks with fewer batches need a join context)",
    )
