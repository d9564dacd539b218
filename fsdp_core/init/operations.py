"""What the recorder needs to know about torch's operations, from their schemas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_core.init.recording import tensors_in

aten = torch.ops.aten

OVERWRITING_OPS = frozenset(
    {
        aten.normal_.default,
        aten.uniform_.default,
        aten.zero_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.copy_.default,
        aten.exponential_.default,
        aten.bernoulli_.float,
    }
)
"""In-place operations that set every element of ``self`` without reading it."""

METADATA_OPS = frozenset(
    {aten._has_compatible_shallow_copy_type.default, aten.is_same_size.default, aten.is_pinned.default}
)
"""Operations that answer from shapes and types alone."""


@dataclass(frozen=True, slots=True)
class OpTraits:
    """What the recorder needs to know about an operation, from its schema."""

    written: tuple[int | str, ...]  # positions, or names of keyword-only arguments
    has_device: bool
    returns_only_values: bool  # numbers or booleans: there is nothing to defer
    makes_only_fresh: bool  # no output aliases an input
    changes_geometry: bool  # transpose_, resize_, set_: an in-place change of size or stride


_traits: dict[Any, OpTraits] = {}


def traits_of(op: Any) -> OpTraits:
    known = _traits.get(op)
    if known is None:
        schema = op._schema
        written = tuple(
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        known = _traits[op] = OpTraits(
            written=written,
            has_device=any(argument.name == "device" for argument in schema.arguments),
            returns_only_values=bool(schema.returns) and not any("Tensor" in str(r.type) for r in schema.returns),
            makes_only_fresh=all(r.alias_info is None for r in schema.returns),
            changes_geometry=torch.Tag.inplace_view in op.tags or op._schema.name in ("aten::set_", "aten::resize_"),
        )
    return known


def written_tensors(traits: OpTraits, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors an operation writes."""
    found: list[Tensor] = []
    for key in traits.written:
        if isinstance(key, str):
            value = kwargs.get(key)
        else:
            value = args[key] if key < len(args) else None
        found.extend(tensors_in(value))
    return found


def result_device(args: Any, kwargs: dict[str, Any]) -> torch.device:
    """Where eager torch would put the result: as asked, else with the inputs (a 0-dim CPU input follows the others)."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    devices = [(t.dim() > 0, t.device) for t in tensors_in([args, kwargs])]
    for has_dims in (True, False):
        for dims, device in devices:
            if dims == has_dims and (device.type != "cpu" or has_dims):
                return device
    return torch.device("cpu")
