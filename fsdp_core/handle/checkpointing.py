"""What torch.distributed.checkpoint asks of a tensor that is spread over ranks (its ``_Checkpointable`` protocol).

A sharded tensor answers with the boxes of its local part: saving moves no data between ranks, and what was saved by
any number of ranks can be loaded by any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp_core.handle.sharded_tensor import ShardedTensor
from fsdp_core.layout.boxes import Box, boxes_of_run, memory_order

# torch.distributed.checkpoint is imported where it is used: by then it has been loaded by whoever saves or loads.


def _boxes(tensor: ShardedTensor) -> list[Box]:
    spec = tensor.spec
    return boxes_of_run(spec.shape, spec.stride, spec.span.start, spec.span.end)


def _view(tensor: ShardedTensor, box: Box) -> Tensor:
    """The box's elements, as a view of ``local`` in the box's logical shape."""
    order = memory_order(tensor.spec.shape, tensor.spec.stride)
    first = tensor.spec.span.start
    in_memory = tensor.local[box.start - first : box.end - first].view([box.sizes[dim] for dim in order])
    return in_memory.permute([order.index(dim) for dim in range(len(order))])


def write_items(tensor: ShardedTensor, fqn: str) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    items = []
    for box in _boxes(tensor):
        offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=tensor.dtype),
            size=tensor.spec.shape,
        )
        items.append(WriteItem(index=MetadataIndex(fqn, offsets), type=WriteItemType.SHARD, tensor_data=data))
    return items


def chunk_list(tensor: ShardedTensor) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in _boxes(tensor)]


def tensor_shard(tensor: ShardedTensor, index: Any) -> Tensor:
    """The part that ``index.offset`` names."""
    boxes = _boxes(tensor)
    if index.offset is None:
        return _view(tensor, boxes[index.index or 0])
    return next(_view(tensor, box) for box in boxes if box.offsets == tuple(index.offset))


ShardedTensor.__create_write_items__ = lambda self, fqn, _: write_items(self, fqn)  # type: ignore[attr-defined]
ShardedTensor.__create_chunk_list__ = chunk_list  # type: ignore[attr-defined]
ShardedTensor.__get_tensor_shard__ = tensor_shard  # type: ignore[attr-defined]
