"""Initialisation without the memory of the whole model.

========================  =====================================================================================
way                       how
========================  =====================================================================================
deferred                  ``deferred_init(build)``: record on a fake device, replay one unit at a time
streamed from CPU         build eagerly on the CPU; the engine moves and shards one unit at a time
on the device             build eagerly under ``torch.device("cuda")``; the engine shards one unit at a time
========================  =====================================================================================

Inside ``seeded_init(seed)`` all three give the same bits (for one device type): see ``seeding``.
"""

from fsdp_core.init.deferred import (
    deferred_init,
    is_deferred,
    materialize,
    materialize_rest,
    materialize_unit,
    recording_digest,
    stream_unit,
)
from fsdp_core.init.fake_tensor import user_attributes
from fsdp_core.init.seeding import seeded_init

__all__ = [
    "deferred_init",
    "is_deferred",
    "materialize",
    "materialize_rest",
    "materialize_unit",
    "recording_digest",
    "seeded_init",
    "stream_unit",
    "user_attributes",
]
