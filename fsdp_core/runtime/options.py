"""The arguments of ``fully_shard`` as one frozen record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_core.errors import WrapError
from fsdp_core.policy import GatherBuffers, MixedPrecision, RateLimit, WireChoice

_FLAGS = ("reshard_after_forward", "backward_prefetch", "forward_prefetch", "cpu_offload", "sync_module_states")


@dataclass(frozen=True, eq=False)
class ShardingOptions:
    """See ``fsdp_core.fully_shard`` for what each means."""

    units: Any = None
    sharding_factor: int | None = None
    process_group: Any = None
    mesh: Any = None
    reshard_after_forward: bool = True
    mixed_precision: MixedPrecision | None = None
    backward_prefetch: bool = True
    forward_prefetch: bool = False
    rate_limit: RateLimit = RateLimit()
    gather_buffers: GatherBuffers = "pooled"
    ignored_modules: tuple[nn.Module, ...] = ()
    sync_module_states: bool = False
    cpu_offload: bool = False
    wire: WireChoice = "auto"
    device: torch.device | None = None
    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        if self.gather_buffers not in ("pooled", "allocator"):
            raise WrapError(
                "`gather_buffers` is not understood.", expected="'pooled' or 'allocator'", got=self.gather_buffers
            )
        if self.wire not in ("auto", "collectives", "gloo_p2p", "shared_memory"):
            raise WrapError(
                "`wire` is not understood.",
                expected="'auto', 'collectives', 'gloo_p2p' or 'shared_memory'",
                got=self.wire,
            )
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise WrapError(f"`{name}` is a switch.", expected="True or False", got=getattr(self, name))
        if self.mixed_precision is not None and not isinstance(self.mixed_precision, MixedPrecision):
            raise WrapError(
                "`mixed_precision` is not understood.",
                expected="an fsdp_core.MixedPrecision, or None",
                got=self.mixed_precision,
            )
        if not isinstance(self.rate_limit, RateLimit):
            raise WrapError("`rate_limit` is not understood.", expected="an fsdp_core.RateLimit", got=self.rate_limit)
        if isinstance(self.sharding_factor, bool):
            raise WrapError(
                "`sharding_factor` is not understood.", expected="a number of ranks, or None", got=self.sharding_factor
            )
        if self.mesh is not None and not callable(getattr(self.mesh, "get_group", None)):
            raise WrapError(
                "`mesh` must be a DeviceMesh.",
                expected="torch.distributed.device_mesh.init_device_mesh(...), or one or two of its axes",
                got=self.mesh,
            )
        if isinstance(self.process_group, (str, list, tuple)):
            raise WrapError(
                "`process_group` must be a process group.",
                expected="what torch.distributed.new_group(ranks) returns",
                got=self.process_group,
            )
        if self.device is not None and self.device.type == "cuda" and not torch.cuda.is_available():
            raise WrapError("There is no CUDA device here.", expected="device='cpu', or a CUDA device", got=self.device)


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Where units are gathered and computed: as asked, else the current CUDA device, else the CPU."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
