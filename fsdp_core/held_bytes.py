"""How many bytes the engine holds on this rank, by what they are for: its own ledger, without asking the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fsdp_core.runtime.find import contexts_in


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of one rank.

    shards: parameters. gradients: memory that reduced gradients lie in, from the first backward on.
    buffers: gathered parameters and gradients on their way, now; peak_buffers: most of them at once so far.
    """

    shards: int
    gradients: int
    buffers: int
    peak_buffers: int

    @property
    def peak(self) -> int:
        """Of all of it, where gradients are kept from step to step."""
        return self.shards + self.gradients + self.peak_buffers


def held_bytes(model: nn.Module) -> HeldBytes:
    """Of everything sharded in ``model``. On shared memory gathers that need no buffer count as none.

    Raises:
        StateError: nothing in the model is sharded.
    """
    contexts = contexts_in(model)
    handles = [handle for context in contexts for _, handle in context.each_handle()]
    memories = [handle.gradient.memory for handle in handles]
    pools = [context.resources.pool for context in contexts]
    return HeldBytes(
        shards=sum(handle.sharded.nbytes for handle in handles),
        gradients=sum(memory.nbytes for memory in memories if memory is not None),
        buffers=sum(pool.live_bytes for pool in pools),
        peak_buffers=sum(pool.peak_live_bytes for pool in pools),
    )
