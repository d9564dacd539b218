"""Clipping by the norm of the whole gradient, with one collective per sharding group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fsdp_core.comm.wire import Label, Wire
from fsdp_core.errors import NumericsError
from fsdp_core.handle.flat_param_handle import FlatParamHandle
from fsdp_core.handle.sharded_tensor import ShardedTensor

_LABEL = Label(-1, "norm", "gradient norm")


_AS_THEY_ARE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def _power_sum(parts: Sequence[Tensor], power: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sum over all elements of |x|^power; their largest |x| for power = inf. 0-dim."""
    wide = [part if part.dtype in _AS_THEY_ARE else part.float() for part in parts if part.numel()]
    if not wide:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack([norm.to(dtype) for norm in torch._foreach_norm(wide, power)])
    return norms.max() if power == float("inf") else norms.pow(power).sum()


def _norm_dtype(handles: Sequence[FlatParamHandle], plain: Sequence[Tensor]) -> torch.dtype:
    """float64 if some parameters are; from what all ranks know, since a rank may hold no element of those."""
    wide = (torch.float64, torch.complex128)
    found = [handle.dtypes.param for handle in handles] + [grad.dtype for grad in plain]
    return torch.float64 if any(dtype in wide for dtype in found) else torch.float32


def local_gradients(handles: Sequence[FlatParamHandle]) -> dict[int, tuple[Wire, list[Tensor]]]:
    """This rank's parts of all gradients, by sharding group."""
    by_wire: dict[int, tuple[Wire, list[Tensor]]] = {}
    for handle in handles:
        entry = by_wire.setdefault(id(handle.wire), (handle.wire, []))
        entry[1].extend(handle.gradient.local_grads())
    return by_wire


def plain_gradients(model: nn.Module) -> list[Tensor]:
    """Dense gradients of parameters that no unit owns.

    Sparse ones are neither counted nor scaled: they are rows of tables that each rank holds a different part of, so
    that no rank knows their norm.
    """
    owned = (p.grad for p in model.parameters() if not isinstance(p, ShardedTensor))
    return [grad for grad in owned if grad is not None and grad.layout is torch.strided]


def total_norm(handles: Sequence[FlatParamHandle], model: nn.Module, norm_type: float) -> Tensor:
    """The norm of the whole gradient: 0-dim float32 (float64 if some parameters are), equal on all ranks.

    Gradients of parameters that no unit owns (ignored modules) are counted as they are: they must be equal on all
    ranks, as replicated parameters are. Sparse ones are left out: see ``plain_gradients``.
    """
    power = float(norm_type)
    is_max = power == float("inf")
    plain = plain_gradients(model)
    device = handles[0].wire.device if handles else plain[0].device if plain else torch.device("cpu")
    dtype = _norm_dtype(handles, plain)
    totals = []
    for wire, parts in local_gradients(handles).values():
        total = _power_sum(parts, power, dtype, device).to(device).reshape(1)
        if is_max:  # backends disagree about the maximum of NaN and a number; infinity is not finite either
            total = torch.nan_to_num(total, nan=float("inf"), posinf=float("inf"))
        wire.all_reduce(total, _LABEL, "max" if is_max else "sum").wait()
        totals.append(total[0])
    if plain or not handles:
        totals.append(_power_sum(plain, power, dtype, device).to(device))
    together = torch.stack(totals)
    return together.max() if is_max else together.sum().pow(1.0 / power)


def clip_grad_norm(
    handles: Sequence[FlatParamHandle], model: nn.Module, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """See ``fsdp_core.clip_grad_norm_``."""
    if not float(norm_type) > 0:
        raise NumericsError(
            "Gradients cannot be clipped by a norm of this order.", expected="norm_type above 0, or inf", got=norm_type
        )
    with torch.no_grad():
        norm = total_norm(handles, model, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):  # host sync, only when asked for
            raise NumericsError(
                "The norm of the gradient is not finite.",
                expected="a finite norm",
                got=norm.item(),
                remedy="lower the learning rate or the loss scale, or pass error_if_nonfinite=False",
            )
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for _, parts in local_gradients(handles).values():
            if parts:
                torch._foreach_mul_(parts, scale.to(parts[0].device))
        plain = plain_gradients(model)
        if plain:
            torch._foreach_mul_(plain, scale)
    return norm
