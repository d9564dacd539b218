"""The public functions. Skeleton of the signatures; the bodies follow within the first milestone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.policy import MixedPrecision, RateLimit


def fully_shard(
    module: nn.Module,
    *,
    units: Any = None,
    sharding_factor: int | None = None,
    process_group: Any = None,
    mesh: Any = None,
    reshard_after_forward: bool = True,
    mixed_precision: MixedPrecision | None = None,
    backward_prefetch: bool = True,
    forward_prefetch: bool = False,
    rate_limit: RateLimit = RateLimit(max_inflight=2),
    gather_buffers: str = "pooled",
    ignored_modules: Iterable[nn.Module] = (),
    sync_module_states: bool = False,
    cpu_offload: bool = False,
    wire: str = "auto",
    device: torch.device | str | None = None,
) -> nn.Module:
    """Shard ``module`` in place and return it."""
    raise NotImplementedError


class FullyShardedDataParallel(nn.Module):
    """Wrapper front end over ``fully_shard``."""


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    raise NotImplementedError
    yield


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    raise NotImplementedError


@contextmanager
def full_parameters(
    model: nn.Module,
    writeback: bool = True,
    with_grads: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
) -> Iterator[None]:
    raise NotImplementedError
    yield


def set_gradient_divide_factor(model: nn.Module, factor: float) -> None:
    raise NotImplementedError


def register_forward_method(module: nn.Module, method_name: str) -> None:
    raise NotImplementedError


def flat_parameters(model: nn.Module) -> list[nn.Parameter]:
    raise NotImplementedError


def describe(model: nn.Module) -> Any:
    raise NotImplementedError


def state_dict(
    model: nn.Module, kind: str = "full", *, rank0_only: bool = False, offload_to_cpu: bool = False
) -> dict[str, Any]:
    raise NotImplementedError


def load_state_dict(model: nn.Module, state: dict[str, Any], strict: bool = True) -> Any:
    raise NotImplementedError


def optim_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, kind: str = "full", *, rank0_only: bool = False
) -> dict[str, Any]:
    raise NotImplementedError


def load_optim_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    raise NotImplementedError
