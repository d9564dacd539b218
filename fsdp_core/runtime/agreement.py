"""Do all ranks hold the same model? Asked once, while wrapping, before anything is sharded.

Structure (names, shapes, dtypes, units) is compared as hashes, one per parameter, so that the first difference can
be named. Values are compared as one checksum per parameter.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from fsdp_core.comm.groups import Groups, largest_anywhere
from fsdp_core.comm.wire import Label, Wire
from fsdp_core.errors import MismatchError
from fsdp_core.init import is_deferred, recording_digest
from fsdp_core.runtime.options import ShardingOptions
from fsdp_core.runtime.plan_units import Plan, PlannedParameter

_LABEL = Label(-1, "state", "agreement of ranks")


def _extremes(wire: Wire, values: list[int]) -> tuple[list[int], list[int]]:
    """Smallest and largest over the ranks, element by element."""
    device = wire.device
    low = torch.tensor(values, dtype=torch.int64, device=device)
    high = low.clone()
    wire.all_reduce(low, _LABEL, "min").wait()
    wire.all_reduce(high, _LABEL, "max").wait()
    return low.tolist(), high.tolist()


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _rows(plan: Plan) -> list[tuple[str, str, PlannedParameter]]:
    rows = []
    for unit in plan.units:
        for parameter in unit.parameters:
            tensor = parameter.tensor
            facts = (
                f"shape {tuple(tensor.shape)}, {tensor.dtype}, requires_grad {tensor.requires_grad}, unit {unit.name}"
            )
            rows.append((unit.name, facts, parameter))
    return rows


# What decides which collectives a rank issues, and when.
_COMMON = (
    "sharding_factor",
    "reshard_after_forward",
    "mixed_precision",
    "backward_prefetch",
    "forward_prefetch",
    "rate_limit",
    "sync_module_states",
    "wire",
)


def check_options(options: ShardingOptions, device: torch.device) -> None:
    """Raises ``MismatchError`` on all ranks if their settings differ. Asked first: groups are built from them."""
    hashes = [_hash(repr(getattr(options, name))) for name in _COMMON]
    most = largest_anywhere(
        [*hashes, *(-one for one in hashes)], process_group=options.process_group, mesh=options.mesh, device=device
    )
    for name, highest, lowest in zip(_COMMON, most, most[len(_COMMON) :], strict=False):
        if highest != -lowest:
            raise MismatchError(
                "The ranks were given different settings.",
                expected=f"the same `{name}` on every rank",
                got=f"on this rank: {getattr(options, name)}",
                remedy="call fully_shard with the same arguments on every rank",
            )


def check_structure(plan: Plan, groups: Groups) -> None:
    """Raises ``MismatchError`` on all ranks if names, shapes, dtypes or units differ anywhere."""
    if groups.world_size == 1 or not groups.has_peers:
        return
    rows = _rows(plan)
    low, high = _extremes(groups.world, [len(rows)])
    if low != high:
        names = [parameter.fqn for _, _, parameter in rows]
        raise MismatchError(
            "The ranks hold models of different structure.",
            unit=plan.units[0].name,
            expected=f"as many parameters on every rank (between {low[0]} and {high[0]} were found)",
            got=f"{len(rows)} on this rank, the last one {names[-1] if names else 'none'}",
            remedy="build the same model on every rank before sharding it",
        )
    if not rows:
        return
    low, high = _extremes(groups.world, [_hash(f"{p.fqn}: {facts}") for _, facts, p in rows])
    for (unit, facts, parameter), a, b in zip(rows, low, high, strict=True):
        if a != b:
            raise MismatchError(
                "The ranks hold models of different structure.",
                unit=unit,
                parameter=parameter.fqn,
                expected="the same parameter on every rank",
                got=f"on this rank: {facts}",
                remedy="build the same model on every rank before sharding it",
            )


def check_values(root: nn.Module, plan: Plan, groups: Groups) -> None:
    """Raises ``MismatchError`` on all ranks if initial values differ; each rank would shard another model."""
    if groups.world_size == 1 or not groups.has_peers:
        return
    _check_recordings(root, plan, groups)
    rows = [row for row in _rows(plan) if not (row[2].tensor.is_meta or is_deferred(row[2].tensor))]
    if not rows:
        return
    low, high = _extremes(groups.world, [_checksum(parameter.tensor) for _, _, parameter in rows])
    for (unit, _, parameter), a, b in zip(rows, low, high, strict=True):
        if a != b:
            raise MismatchError(
                "The ranks hold different initial values.",
                unit=unit,
                parameter=parameter.fqn,
                expected="equal values on every rank",
                got="other values on at least one rank",
                remedy="seed all ranks alike before building the model, or pass sync_module_states=True",
            )


def _check_recordings(root: nn.Module, plan: Plan, groups: Groups) -> None:
    """The same for parameters that are still recordings: equal operations from equal seeds."""
    if any(is_deferred(parameter.tensor) for _, _, parameter in _rows(plan)):
        low, high = _extremes(groups.world, [recording_digest(root)])
        if low != high:
            raise MismatchError(
                "The ranks recorded different initial values.",
                unit=plan.units[0].name,
                expected="the same operations from the same seeds on every rank",
                got="another recording on at least one rank",
                remedy="build inside seeded_init(seed) with one seed for all ranks, or pass sync_module_states=True",
            )


def _checksum(tensor: torch.Tensor) -> int:
    """Equal tensors give equal numbers; different ones almost surely do not."""
    with torch.no_grad():
        value = tensor.detach()
        if value.is_complex():
            value = torch.view_as_real(value)
        value = value.to(torch.float64).reshape(-1)
        weights = torch.arange(1, 8, dtype=torch.float64, device=value.device)
        whole = value.numel() // 7 * 7
        total = (value[:whole].view(-1, 7) * weights).sum() + (value[whole:] * weights[: value.numel() - whole]).sum()
        return int(total.view(torch.int64).item()) if total.numel() else 0
