"""What went wrong on one rank goes wrong on all of them, in the same words."""

from __future__ import annotations

import torch

from recipes.checkpoint.errors import CheckpointError, DamagedCheckpoint, Superseded
from recipes.ranks import Ranks

_KINDS: tuple[type[CheckpointError], ...] = (CheckpointError, DamagedCheckpoint, Superseded)
_LONGEST = 2000  # bytes of a message that travel


def raise_together(ranks: Ranks, error: CheckpointError | None) -> None:
    """Raise the error of the lowest rank that has one, on every rank. Collective: one small maximum if all is well."""
    told = together(ranks, error)
    if told is not None:
        raise told


def together(ranks: Ranks, error: CheckpointError | None) -> CheckpointError | None:
    """The error of the lowest rank that has one, on every rank. Collective."""
    if ranks.world_size == 1:
        return error
    code = 0 if error is None else 1 + _KINDS.index(type(error))
    if not int(ranks.max(torch.tensor([code], device=ranks.device)).item()):
        return None
    text = b"" if error is None else str(error).encode()[:_LONGEST]
    sent = torch.zeros(1, _LONGEST + 2, dtype=torch.uint8, device=ranks.device)
    row = bytes([code]) + text
    sent[0, : len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    for rank, content in enumerate(ranks.gather(sent).cpu()):
        received = bytes(content.tolist()).rstrip(b"\0")
        if received:
            words = received[1:].decode(errors="replace")
            where = "" if rank == 0 else f"rank {rank}: "
            return _KINDS[received[0] - 1](where + words)
    raise AssertionError("a rank told of an error and then had none")


def longest(ranks: Ranks, seconds: float) -> float:
    """Of all ranks. Collective."""
    return float(ranks.max(torch.tensor([seconds], dtype=torch.float64, device=ranks.device)).item())
