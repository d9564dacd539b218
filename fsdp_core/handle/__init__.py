"""One unit's tensors and their life."""

from fsdp_core.handle import checkpointing as checkpointing
from fsdp_core.handle import sharded_ops as sharded_ops  # gives ShardedTensor its operations
