"""What the optimizers of this package share: holdings of their parameters, and sums over a sharding group."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fsdp_core.comm.wire import Label, Wire
from fsdp_core.errors import NumericsError
from fsdp_core.numerics.optimizers.geometry import Holding, holding_of

LABEL = Label(unit_id=-1, phase="optimizer", unit="optimizer step")
BUCKET_BYTES = 64 << 20
"""How much scratch memory a step may take (one unit's shard at least); each bucket costs a few collectives."""


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose result does not depend on how parameters are sharded.

    State per parameter: tensors of the parameter's own shape are element-wise; ``whole[fqn][key]`` is the same on
    every rank of the sharding group and belongs to that original parameter as a whole; ``parts[fqn][key]`` is 1-D
    and holds the elements of that original parameter that this rank holds. Which keys are kept in the last two ways
    is a fact of the class; ``fsdp_core.optim_state_dict`` reads it.
    """

    whole_keys: ClassVar[frozenset[str]] = frozenset()
    part_keys: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._holdings: dict[Tensor, Holding] = {}
        for group in self.param_groups:
            for param in group["params"]:
                self._holding(param)  # refuses what it cannot do now, not in the first step

    def __setstate__(self, state: dict[str, Any]) -> None:  # after a copy: holdings follow the copied parameters
        super().__setstate__(state)
        self._holdings = {}

    def _holding(self, param: Tensor) -> Holding:
        holding = self._holdings.get(param)
        if holding is None:
            if param.is_complex():
                raise NumericsError(
                    "Optimizers of fsdp_core work on real numbers",
                    got=f"a {param.dtype} parameter of shape {tuple(param.shape)}",
                    remedy="store the parameter as a real tensor (torch.view_as_real) or use torch.optim.AdamW",
                )
            holding = self._holdings[param] = holding_of(param)
        return holding

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. ``closure`` recomputes the loss, as in torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            holdings = [self._holding(p) for p in group["params"] if p.grad is not None]
            if holdings:
                self._step_group(group, holdings)
        return loss

    @abc.abstractmethod
    def _step_group(self, group: dict[str, Any], holdings: Sequence[Holding]) -> None: ...


class GroupSums:
    """Small tensors, each to be summed over the ranks that hold a parameter: one collective per sharding group."""

    def __init__(self) -> None:
        self._parts: list[tuple[Wire | None, Tensor]] = []

    def add(self, holding: Holding, part: Tensor) -> int:
        """Returns the ticket for the sum. Every rank of the group adds the same sizes in the same order."""
        self._parts.append((None if holding.home is None else holding.home.wire, part))
        return len(self._parts) - 1

    def reduce(self) -> list[Tensor]:
        """The sums, by ticket."""
        sums = [part for _, part in self._parts]
        for wire, tickets in self._by_wire():
            shapes = [sums[ticket].shape for ticket in tickets]
            together = torch.cat([sums[ticket].reshape(-1) for ticket in tickets])
            reduced = together.to(wire.device)
            wire.all_reduce(reduced, LABEL).wait()
            together = reduced.to(together.device)
            split = together.split([shape.numel() for shape in shapes])
            for ticket, shape, values in zip(tickets, shapes, split, strict=True):
                sums[ticket] = values.view(shape)
        return sums

    def _by_wire(self) -> Iterator[tuple[Wire, list[int]]]:
        by_wire: dict[int, tuple[Wire, list[int]]] = {}
        for ticket, (wire, _) in enumerate(self._parts):
            if wire is not None:
                by_wire.setdefault(id(wire), (wire, []))[1].append(ticket)
        yield from by_wire.values()


def square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of each tensor, as one 1-D float64 tensor: sums over ranks lose nothing worth counting."""
    if not tensors:
        return torch.empty(0, dtype=torch.float64)
    wide = [t if t.dtype in (torch.float32, torch.float64) else t.float() for t in tensors]
    filled = [t for t in wide if t.numel()]
    norms = iter(torch._foreach_norm(filled) if filled else ())
    zero = torch.zeros((), device=tensors[0].device, dtype=torch.float64)
    return torch.stack([next(norms).double().square() if t.numel() else zero for t in wide])
