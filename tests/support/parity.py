"""Sharded training beside plain training, step by step, on warm ranks.

Every rank holds the same plain reference and knows every rank's batch, so the expected gradient (the mean over
ranks of plain gradients) needs no communication. ``compare`` checks gradients before they are cleared, and
parameters after the step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core.comm.wire import Label
from fsdp_core.handle.sharded_tensor import ShardedTensor
from fsdp_core.runtime import unit

Loss = Callable[[nn.Module, Any], Tensor]


def whole(value: Tensor) -> Tensor:
    """A sharded tensor, assembled over its sharding group; every rank calls."""
    if not isinstance(value, ShardedTensor):
        return value.detach().clone()
    spec = value.spec
    total = torch.zeros(spec.numel, dtype=value.local.dtype)
    total[spec.span.start : spec.span.end] = value.local
    summable = torch.view_as_real(total).reshape(-1) if total.is_complex() else total.to(torch.float64)
    spec.wire.all_reduce(summable, Label(-1, "test")).wait()
    total = torch.view_as_complex(summable.view(-1, 2)) if total.is_complex() else summable
    return total.to(value.local.dtype).as_strided(spec.shape, spec.stride)


@contextmanager
def early_gradients(is_on: bool = True) -> Iterator[None]:
    """Models sharded in this block collect every gradient as soon as it is complete, not just large ones."""
    with mock.patch.object(unit, "EARLY_NUMEL", 0 if is_on else unit.EARLY_NUMEL):
        yield


class Pair:
    """A sharded model and its plain reference."""

    def __init__(
        self, model: nn.Module, *, lr: float = 0.5, optimizer: Any = None, is_early: bool = False, **options: Any
    ) -> None:
        self.plain = copy.deepcopy(model)
        with early_gradients(is_early):
            self.sharded = fsdp_core.fully_shard(model, **options)
        make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=lr))
        self.plain_optimizer = make(self.plain.parameters())
        self.optimizer = make(self.sharded.parameters())

    def plain_gradients(self, batches: Sequence[Any], loss: Loss) -> dict[str, Tensor | None]:
        """Mean over ranks of the plain gradients, added to what ``plain`` has; leaves them in ``.grad``."""
        before = {n: None if p.grad is None else p.grad.clone() for n, p in self.plain.named_parameters()}
        sums: dict[str, Tensor | None] = dict.fromkeys(before)
        for batch in batches:
            self.plain.zero_grad()
            loss(self.plain, batch).backward()
            for name, parameter in self.plain.named_parameters():
                if parameter.grad is not None:
                    grad = parameter.grad / len(batches)
                    sums[name] = grad if sums[name] is None else sums[name] + grad
        for name, parameter in self.plain.named_parameters():
            grad, old = sums[name], before[name]
            parameter.grad = old if grad is None else grad if old is None else old + grad
        return {n: p.grad for n, p in self.plain.named_parameters()}

    def plain_gradients_from(self, buffers: dict[str, Tensor], batches: Sequence[Any], loss: Loss) -> None:
        """As ``plain_gradients``, every batch starting from the same buffers, as every rank does."""
        total: dict[str, Tensor] = {}
        for batch in batches:
            for name, buffer in self.plain.named_buffers():
                buffer.copy_(buffers[name])
            self.plain.zero_grad()
            loss(self.plain, batch).backward()
            for name, parameter in self.plain.named_parameters():
                if parameter.grad is not None:
                    total[name] = total.get(name, 0) + parameter.grad / len(batches)
        for name, parameter in self.plain.named_parameters():
            parameter.grad = total.get(name)

    def check_gradients(self, **tolerance: float) -> None:
        """Sharded gradients equal the plain ones; absent means absent or zero."""
        for (name, plain), (other, sharded) in zip(
            self.plain.named_parameters(), self.sharded.named_parameters(), strict=True
        ):
            assert name == other
            if plain.grad is None:
                assert sharded.grad is None or not whole(sharded.grad).any(), name
                continue
            assert sharded.grad is not None, f"{name} has no gradient"
            torch.testing.assert_close(
                whole(sharded.grad), plain.grad, msg=lambda m, n=name: f"{n}.grad: {m}", **tolerance
            )

    def check_parameters(self, **tolerance: float) -> None:
        state = fsdp_core.state_dict(self.sharded)
        for name, value in self.plain.state_dict().items():
            torch.testing.assert_close(state[name], value, msg=lambda m, n=name: f"{n}: {m}", **tolerance)

    def step(self, rank: int, batches: Sequence[Any], loss: Loss, **tolerance: float) -> None:
        """One step of both, compared before and after the optimizers."""
        self.plain_gradients(batches, loss)
        loss(self.sharded, batches[rank]).backward()
        self.finish_step(**tolerance)

    def finish_step(self, **tolerance: float) -> None:
        self.check_gradients(**tolerance)
        self.plain_optimizer.step()
        self.optimizer.step()
        self.check_parameters(**tolerance)
        self.plain_optimizer.zero_grad()
        self.optimizer.zero_grad()


def batches_for(world_size: int, *shape: int, seed: int = 0) -> list[Tensor]:
    """One different random batch per rank, the same list on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(world_size)]


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().pow(2).mean()


def is_idle(model: nn.Module) -> bool:
    """Nothing gathered, nothing on its way, no forward open."""
    from fsdp_core.runtime.find import contexts_in

    for context in contexts_in(model):
        if context.current.num_open or context.tasks.callbacks or context.limiter.num_inflight:
            return False
        if any(not unit.is_sharded or unit.calls for unit in context.units):
            return False
        live = {role.value: count for role, count in context.resources.pool.num_live.items() if count}
        if live:
            return False
    return True
