"""Arithmetic that the CPU wires share: parts of a flat tensor, and sums in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsdp_core.comm.wire import Label
from fsdp_core.errors import WireError

Combine = Callable[..., Tensor]
COMBINE: dict[str, Combine] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
CHUNK_BYTES = 256 << 10  # sums of three and more tensors go through the cache in pieces of this size


def part_of(full: Tensor, rank: int, size: int) -> Tensor:
    """The ``rank``-th of ``size`` equal parts."""
    numel = full.numel() // size
    return full[rank * numel : (rank + 1) * numel]


def combine_into(targets: Sequence[Tensor], sources: Sequence[Tensor], combine: Combine) -> None:
    """Write ``sources[0] + sources[1] + ...``, in this order, into every target; targets may be sources.

    A target is written in pieces after the piece has been read from every source, so aliasing is harmless.
    """
    if len(sources) == 1:
        for target in targets:
            target.copy_(sources[0])
        return
    if len(sources) == 2 and len(targets) == 1:
        combine(sources[0], sources[1], out=targets[0])
        return
    numel = sources[0].numel()
    step = max(1, CHUNK_BYTES // sources[0].element_size())
    scratch = torch.empty(min(step, numel), dtype=sources[0].dtype)
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        piece = combine(sources[0][start:stop], sources[1][start:stop], out=scratch[: stop - start])
        for source in sources[2:]:
            combine(piece, source[start:stop], out=piece)
        for target in targets:
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
