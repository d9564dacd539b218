"""One example on a rank: sharded training beside plain training of the same tree, compared at every step.

Models are fp64, so that a wrong number stands out from rounding. "compute" casts to fp32 for forward, backward and
reduction, "reduce" reduces and sums in fp64 again; the reference is then an fp32 copy of the plain model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fsdp_core
from tests.fsdp_core.properties.examples import Example, Settings, Step, compute_dtype
from tests.fsdp_core.properties.trees import Whose, build
from tests.support.parity import early_gradients, is_idle, whole
from tests.support.ranks import Rank

BATCH = 3  # rows


def engine_options(settings: Settings) -> dict[str, Any]:
    limit = (
        fsdp_core.RateLimit(settings.max_inflight) if settings.max_inflight else fsdp_core.RateLimit(kind="unlimited")
    )
    reduce = torch.float64 if settings.precision == "reduce" else None
    return {
        "sharding_factor": settings.factor,
        "reshard_after_forward": settings.reshard_after_forward,
        "backward_prefetch": settings.backward_prefetch,
        "forward_prefetch": settings.forward_prefetch,
        "rate_limit": limit,
        "gather_buffers": settings.gather_buffers,
        "wire": settings.wire,
        "cpu_offload": settings.cpu_offload,
        "mixed_precision": fsdp_core.MixedPrecision(torch.float32, reduce) if settings.precision else None,
    }


def _optimizer(example: Example, parameters: Any) -> torch.optim.Optimizer:
    if example.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
    # a large eps: else the sign of a rounding error decides where the true gradient is zero
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-3, weight_decay=0.0)


class Training:
    """The sharded model and its reference."""

    def __init__(self, rank: Rank, example: Example) -> None:
        self.rank, self.example = rank, example
        self.plain, self.model = build(example.tree), build(example.tree)
        options = engine_options(example.settings)
        units = self.model.chosen
        front = fsdp_core.FullyShardedDataParallel if example.settings.is_wrapped else fsdp_core.fully_shard
        with early_gradients(example.settings.is_early):
            self.sharded: nn.Module = front(self.model, units=units, **options)
        trained = [p for p in self.plain.parameters() if p.is_floating_point()]
        self.plain_optimizer = _optimizer(example, trained)
        named = [p for p in self.sharded.parameters() if p.is_floating_point()]
        flat = fsdp_core.flat_parameters(self.sharded) if example.face == "flat" else named
        self.optimizer = _optimizer(example, flat)
        # fp32 parameters among fp64 ones round, and so does everything downstream of them
        is_exact = compute_dtype(example) == torch.float64 and "odd" not in example.tree.kinds()
        self.tolerance = {"rtol": 1e-9, "atol": 1e-10} if is_exact else {"rtol": 2e-5, "atol": 2e-5}

    def batches(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(BATCH, 3, generator=generator, dtype=torch.float64) for _ in range(self.rank.world_size)]

    def loss(self, model: nn.Module, batch: Tensor, whose: int) -> Tensor:
        Whose.rank = whose
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "None of the inputs have requires_grad"
            )  # reentrant checkpoints, plain too
            return model(batch).double().pow(2).mean()

    def add_plain_gradients(self, seed: int) -> None:
        """Mean over ranks of the gradients of one micro-batch, added to what the reference has."""
        source = self.plain
        if self.example.settings.precision:
            source = copy.deepcopy(self.plain).float()
        for whose, batch in enumerate(self.batches(seed)):
            work = copy.deepcopy(source)
            work.zero_grad()
            self.loss(work, batch.to(compute_dtype(self.example)), whose).backward()
            for target, parameter in zip(self.plain.parameters(), work.parameters(), strict=True):
                if parameter.grad is None:
                    continue
                grad = parameter.grad.to(target.dtype) / self.rank.world_size
                target.grad = grad if target.grad is None else target.grad + grad

    def backward(self, seed: int, is_synced: bool) -> None:
        batch = self.batches(seed)[self.rank.rank]
        run: Callable[[], None] = lambda: self.loss(self.sharded, batch, self.rank.rank).backward()  # noqa: E731
        if is_synced:
            run()
        else:
            with fsdp_core.no_sync(self.sharded):
                run()

    def clear(self) -> None:
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.zero_grad()

    def step(self, number: int, step: Step) -> None:
        if step.evaluates:
            with torch.no_grad():
                self.loss(self.sharded, self.batches(900 + number)[self.rank.rank], self.rank.rank)
        for index, is_synced in enumerate(step.micro_batches):
            seed = 10 * number + index
            self.add_plain_gradients(seed)
            self.backward(seed, is_synced)
            if index == 0 and step.clears_after_first and len(step.micro_batches) > 1:
                self.clear()
        self.check_gradients()
        if step.clips:
            norm = fsdp_core.clip_grad_norm_(self.sharded, 0.05)
            expected = nn.utils.clip_grad_norm_(self.plain.parameters(), 0.05)
            torch.testing.assert_close(norm, expected, **self.tolerance)
        self.plain_optimizer.step()
        self.optimizer.step()
        self.check_parameters()
        self.clear()
        assert is_idle(self.sharded), "the engine is not idle after a step"

    def check_gradients(self) -> None:
        if self.example.face == "flat":
            return  # the parameters after the step tell
        pairs = zip(self.plain.named_parameters(), self.sharded.named_parameters(), strict=True)
        for (name, plain), (other, sharded) in pairs:
            assert name == other
            if plain.grad is None:
                assert sharded.grad is None or not whole(sharded.grad).any(), f"{name} has a gradient from nowhere"
                continue
            assert sharded.grad is not None, f"{name} has no gradient"
            assert sharded.grad.shape == plain.grad.shape
            found = whole(sharded.grad)
            torch.testing.assert_close(found, plain.grad, msg=lambda m, n=name: f"{n}.grad: {m}", **self.tolerance)

    def check_parameters(self) -> None:
        state = fsdp_core.state_dict(self.sharded)
        assert list(state) == list(self.plain.state_dict())
        for name, value in self.plain.state_dict().items():
            torch.testing.assert_close(state[name], value, msg=lambda m, n=name: f"{n}: {m}", **self.tolerance)


def check_example(rank: Rank, example: Example) -> None:
    training = Training(rank, example)
    for number, step in enumerate(example.steps):
        training.step(number, step)
