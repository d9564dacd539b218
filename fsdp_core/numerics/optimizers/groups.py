"""Parameter groups by name, also where one flat parameter holds parameters of several groups.

    groups = parameter_groups(flat_parameters(model), [no_decay()], {"weight_decay": 0.1})
    optimizer = torch.optim.AdamW(groups, lr=3e-4, fused=True)

A flat parameter is cut into runs of neighbouring original parameters of one group. Each run is a ``FlatSlice``: a 1-D
parameter whose data is that part of the shard and whose gradient is that part of the shard's gradient. Any
element-wise optimizer, scheduler, gradient scaler or clipping takes it as it takes any parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.errors import NumericsError
from fsdp_core.handle.flat_parameter import FlatParameter, FlatSegment
from fsdp_core.handle.sharded_tensor import ShardedTensor

Matches = Callable[[str, tuple[int, ...]], bool]


@dataclass(frozen=True)
class GroupRule:
    """Original parameters for which ``matches(fqn, shape)`` holds get ``options``; the first rule that matches wins."""

    matches: Matches
    options: dict[str, Any]


def no_decay() -> GroupRule:
    """No weight decay for biases, norms and everything else with fewer than two dims."""
    return GroupRule(lambda fqn, shape: len(shape) < 2 or fqn.rpartition(".")[2] == "bias", {"weight_decay": 0.0})


class FlatSlice(FlatParameter):
    """A run of original parameters inside a ``FlatParameter``. ``segments`` are those of the run; their ``shard_start``
    still counts inside the whole shard, in which this slice begins at ``shard_offset``."""

    _flat: FlatParameter
    _start: int

    @staticmethod
    def of(base: FlatParameter, segments: Sequence[FlatSegment]) -> FlatSlice:
        filled = [segment.span for segment in segments if segment.span.numel]
        start = filled[0].shard_start if filled else 0
        end = filled[-1].shard_end if filled else 0
        made = torch.Tensor._make_subclass(FlatSlice, base.data[start:end], base.requires_grad)
        made._flat, made._start = base, start
        made.segments, made.unit_name, made.wire = tuple(segments), base.unit_name, base.wire
        return made

    @property
    def base(self) -> FlatParameter:
        return self._flat

    @property
    def shard_offset(self) -> int:
        return self._start

    @property
    def grad(self) -> Tensor | None:
        """The part of the shard's gradient; made anew each time, so that nothing keeps the gradient's memory."""
        grad = self._flat.grad
        return None if grad is None else grad[self._start : self._start + self.numel()]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        """``None`` clears the whole shard's gradient; a tensor is copied into this part of it."""
        if value is None:
            self._flat.grad = None
            return
        if self._flat.grad is None:
            self._flat.grad = torch.zeros_like(self._flat)
        self._flat.grad[self._start : self._start + self.numel()].copy_(value)


def parameter_groups(
    parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
    rules: Sequence[GroupRule],
    defaults: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: those matched by no rule first, then one group per rule.

    Args:
        parameters: ``flat_parameters(model)``, or ``model.parameters()`` after sharding, or ``named_parameters()`` of
            any model.
        rules: the first that matches an original parameter's name and shape decides.
        defaults: options of the first group.

    Returns:
        The same groups, in the same order, on every rank. Groups that match nothing anywhere are left out.
    """
    members: list[list[Tensor]] = [[] for _ in range(len(rules) + 1)]

    def group_of(fqn: str, shape: tuple[int, ...]) -> int:
        return next((i + 1 for i, rule in enumerate(rules) if rule.matches(fqn, shape)), 0)

    for item in parameters:
        name, parameter = item if isinstance(item, tuple) else (None, item)
        if isinstance(parameter, FlatParameter):
            for index, run in _runs(parameter, group_of):
                members[index].append(run)
        elif isinstance(parameter, ShardedTensor):
            members[group_of(parameter.spec.fqn, tuple(parameter.spec.shape))].append(parameter)
        elif name is not None:
            members[group_of(name, tuple(parameter.shape))].append(parameter)
        else:
            raise NumericsError(
                "A parameter without a name cannot be grouped by name",
                got=f"a {type(parameter).__name__} of shape {tuple(parameter.shape)}",
                remedy="pass model.named_parameters() or flat_parameters(model)",
            )
    options = [dict(defaults or {}), *(dict(rule.options) for rule in rules)]
    return [{**chosen, "params": params} for chosen, params in zip(options, members, strict=True) if params]


def _runs(parameter: FlatParameter, group_of: Callable[[str, tuple[int, ...]], int]) -> list[tuple[int, nn.Parameter]]:
    """Cut where the group changes; the parameter itself if it never does."""
    runs: list[tuple[int, list[FlatSegment]]] = []
    for part in parameter.segments:
        index = group_of(part.segment.fqn, part.segment.shape)
        if not runs or runs[-1][0] != index:
            runs.append((index, []))
        runs[-1][1].append(part)
    if len(runs) == 1:
        return [(runs[0][0], parameter)]
    return [(index, FlatSlice.of(parameter, segments)) for index, segments in runs]
