"""Which wire a group of ranks gets: the setting ``wire``, checked against what this group can really use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_core.comm.wire import Wire
from fsdp_core.policy import WireChoice


@dataclass(frozen=True)
class WireSelection:
    """The wire that was built, and why it is this one when it is not the one that was asked for."""

    wire: Wire
    requested: WireChoice
    message: str = ""  # one sentence, "" when the choice was met as asked


def choose_wire(
    choice: WireChoice,
    *,
    group: dist.ProcessGroup | None,
    ranks: Sequence[int],
    device: torch.device,
    ranks_per_host: int | None = None,
    timeout: timedelta = timedelta(minutes=10),
    expected_bytes: int = 0,
) -> WireSelection:
    """Build the wire of one group; collective over the group.

    Args:
        choice: ``auto`` takes ``collectives`` on CUDA, ``shared_memory`` on CPU when all ranks of the group
            are on one host, else ``gloo_p2p``. A wire asked for by name that cannot be had is replaced only
            where that is safe (``shared_memory`` by ``gloo_p2p``), and the message says why.
        group: the torch group of exactly these ranks; ``None`` for a group of one (the local wire).
        ranks: global ranks in group order.
        ranks_per_host: hosts hold this many consecutive global ranks; only for counting bytes.
        timeout: how long a collective waits for a peer before it raises ``WireError``.
        expected_bytes: what this rank will ask of ``empty`` in all; shared memory checks now that it is there.
    """
    raise NotImplementedError
