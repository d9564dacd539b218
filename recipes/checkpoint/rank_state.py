"""What belongs to one rank: random generators and the like, and buffers that are not the same everywhere.

Running statistics of a batch norm follow the samples of one rank. The checkpoint has rank 0's under the buffer's own
name; a rank whose buffer differs adds its own. Both are of use only to the same number of ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.layout.flat_layout import contiguous_stride
from recipes.checkpoint.manifest import BUFFER, RANK
from recipes.checkpoint.parts import Part
from recipes.checkpoint.reader import CheckpointReader
from recipes.checkpoint.safe_file import bytes_of
from recipes.ranks import Ranks


def state_name(rank: int, key: str) -> str:
    return f"rank/{rank}/state/{key}"


def buffer_name(rank: int, name: str) -> str:
    return f"rank/{rank}/buffer/{name}"


def rank_parts(per_rank: dict[str, Any], rank: int) -> tuple[list[Part], dict[str, Any]]:
    """(tensors as parts, the rest) of a run's state of one rank."""
    tensors = {key: value for key, value in per_rank.items() if isinstance(value, Tensor)}
    parts = [_own_part(state_name(rank, key), value.detach(), rank) for key, value in tensors.items()]
    return parts, {key: value for key, value in per_rank.items() if key not in tensors}


def own_buffers(parts: Sequence[Part], ranks: Ranks) -> list[Part]:
    """Of a state's parts, this rank's buffers that differ from rank 0's. Collective where the model has buffers."""
    buffers = [part for part in parts if part.kind == BUFFER]
    if not buffers or ranks.world_size == 1:
        return []
    sums = torch.tensor([[zlib.crc32(bytes_of(part.values)) for part in buffers]], dtype=torch.int64)
    first = ranks.gather(sums.to(ranks.device)).cpu()[0]
    return [
        _own_part(
            buffer_name(ranks.rank, part.name),
            part.values.as_strided(part.shape, part.stride or _rows(part)),
            ranks.rank,
        )
        for part, own, of_rank_0 in zip(buffers, sums[0].tolist(), first.tolist(), strict=True)
        if own != of_rank_0
    ]


def load_own_buffers(reader: CheckpointReader, model: nn.Module, rank: int) -> None:
    """After ``restore.load_model``: this rank's own, where it had some."""
    names = set(reader.names(RANK))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if buffer_name(rank, name) in names:
                buffer.copy_(reader.whole(buffer_name(rank, name)))


def read_rank_state(reader: CheckpointReader, rank: int) -> dict[str, Any]:
    """Tensors are copies: nothing of the checkpoint's files stays in use."""
    prefix = state_name(rank, "")
    tensors = {
        name.removeprefix(prefix): reader.whole(name).clone() for name in reader.names(RANK) if name.startswith(prefix)
    }
    return {**reader.manifest.per_rank[rank], **tensors}


def _own_part(name: str, value: Tensor, rank: int) -> Part:
    flat = value.contiguous().view(-1)
    return Part(name, RANK, tuple(value.shape), None, 0, flat.numel(), flat, (rank,))


def _rows(part: Part) -> tuple[int, ...]:
    return contiguous_stride(part.shape)
