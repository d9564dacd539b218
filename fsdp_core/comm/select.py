"""Which wire a group of ranks gets: the setting ``wire``, checked against what this group can really use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_core.comm.collectives import CollectivesWire
from fsdp_core.comm.gloo_p2p import GlooP2PWire
from fsdp_core.comm.local import LocalWire
from fsdp_core.comm.rendezvous import GroupRendezvous
from fsdp_core.comm.shared_memory import SharedMemoryWire
from fsdp_core.comm.wire import Wire
from fsdp_core.errors import WireError
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
    timeout: timedelta | None = None,
    expected_bytes: int = 0,
) -> WireSelection:
    """Build the wire of one group; collective over the group.

    Args:
        choice: ``auto`` takes ``collectives`` on CUDA (and on CPU backends other than gloo), ``shared_memory`` on
            CPU when all ranks of the group are on one host, else ``gloo_p2p``. Where ``shared_memory`` cannot be
            had, asked for by name or not, ``gloo_p2p`` takes its place and the message says why.
        group: the torch group of exactly these ranks; ``None`` for a group of one (the local wire).
        ranks: global ranks in group order.
        ranks_per_host: hosts hold this many consecutive global ranks; only for counting bytes.
        timeout: how long a collective waits for a peer before it raises ``WireError``; ``None``: as the group does.
        expected_bytes: what this rank will ask of ``empty`` in all; shared memory is refused if it is not there.

    Raises:
        WireError: a CPU-only wire was asked for by name on another device or backend.
    """
    if group is None or len(ranks) == 1:
        return WireSelection(LocalWire(device), choice)
    backend = backend_of(group, device)
    timeout = timeout_of(group, device) if timeout is None else timeout
    if device.type != "cpu" or backend != "gloo":
        if choice in ("gloo_p2p", "shared_memory"):
            raise WireError(
                f"the wire {choice!r} is for CPU tensors and the gloo backend",
                expected="device cpu, backend gloo",
                got=f"device {device.type}, backend {backend}",
                remedy="use wire='auto' or wire='collectives'",
            )
        return WireSelection(CollectivesWire(group, ranks, device, ranks_per_host), choice)
    if choice == "collectives":
        return WireSelection(CollectivesWire(group, ranks, device, ranks_per_host, compares_first=True), choice)
    message = ""
    if choice in ("auto", "shared_memory"):
        try:
            wire = SharedMemoryWire(
                GroupRendezvous(group), ranks_per_host=ranks_per_host, timeout=timeout, expected_bytes=expected_bytes
            )
        except WireError as error:
            message = f"Ranks {list(ranks)} talk through gloo_p2p instead of shared memory: {error.got}"
        else:
            return WireSelection(wire, choice)
    return WireSelection(GlooP2PWire(group, ranks, ranks_per_host=ranks_per_host, timeout=timeout), choice, message)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that moves this device's tensors: groups may have one per device type."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl", or one name for all devices
    by_device = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return by_device.get(device.type, config)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the group's backend for ``device`` waits (what ``init_process_group`` was given, usually)."""
    options = getattr(group._get_backend(device), "options", None)  # some backends (the fake one) have none
    return getattr(options, "_timeout", dist.default_pg_timeout)
