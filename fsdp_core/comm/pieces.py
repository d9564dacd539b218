"""Arithmetic that the CPU wires share: parts of a flat tensor, and sums in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsdp_core.comm.wire import Label
from fsdp_core.errors import WireError

Combine = Callable[..., Tensor]
COMBINE: dict[str, Combine] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
CHUNK_BYTES = 256 << 10  # sums of several steps go through the cache in pieces of this size


def part_of(full: Tensor, rank: int, size: int) -> Tensor:
    """The ``rank``-th of ``size`` equal parts."""
    numel = full.numel() // size
    return full[rank * numel : (rank + 1) * numel]


def combine_into(targets: Sequence[Tensor], sources: Sequence[Tensor], combine: Combine, divisor: float = 1.0) -> None:
    """Write ``(sources[0] + sources[1] + ...) / divisor``, summed in this order, into every target.

    Targets may be sources: a piece of a target is written after that piece has been read from every source.
    """
    numel = sources[0].numel()
    if len(sources) == 2 and len(targets) == 1 and divisor == 1:
        combine(sources[0], sources[1], out=targets[0])
        return
    step = max(1, CHUNK_BYTES // sources[0].element_size())
    # two sources are read whole before the piece is written, so it may be made in place
    scratch = None if len(sources) <= 2 else torch.empty(min(step, numel), dtype=sources[0].dtype)
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        piece = targets[0][start:stop] if scratch is None else scratch[: stop - start]
        if len(sources) == 1:
            piece.copy_(sources[0][start:stop])
        else:
            combine(sources[0][start:stop], sources[1][start:stop], out=piece)
        for source in sources[2:]:
            combine(piece, source[start:stop], out=piece)
        if divisor != 1:
            piece.div_(divisor)
        for target in targets if scratch is not None else targets[1:]:
            target[start:stop].copy_(piece)


def check_sizes(primitive: str, full: Tensor, shard: Tensor, group_size: int, label: Label) -> None:
    """``full`` must be ``group_size`` shards long; a reduction keeps one dtype."""
    if full.numel() != group_size * shard.numel():
        raise WireError(
            f"{primitive}: the full tensor must have {group_size} times the elements of the shard",
            unit=label.unit or None,
            expected=group_size * shard.numel(),
            got=full.numel(),
        )
    if primitive == "reduce_scatter" and shard.dtype != full.dtype:
        raise WireError(
            "reduce_scatter needs one dtype for both tensors",
            unit=label.unit or None,
            expected=str(full.dtype),
            got=str(shard.dtype),
        )
