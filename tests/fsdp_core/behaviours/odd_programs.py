"""Programs that people do write: each trains, or must be refused by name. ``test_odd_programs.py`` runs them.

A program is a function of (rank, options). It compares with plain training by itself.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core import ShardedGradScaler
from fsdp_core.errors import StateError, WrapError
from tests.fsdp_core.behaviours.variants import Tower, message_of
from tests.support.parity import Pair, batches_for, is_idle, mean_square, whole
from tests.support.ranks import Rank

Program = Callable[[Rank, dict[str, Any]], None]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def tower(options: dict[str, Any], **more: Any) -> Pair:
    model = Tower()
    return Pair(model, units=[model.first, model.inner, model.last], **options, **more)


def steps(pair: Pair, rank: Rank, loss: Any = mean_square, count: int = 2, first: int = 0, width: int = 4) -> None:
    for step in range(first, first + count):
        pair.step(rank.rank, batches_for(rank.world_size, 3, width, seed=step), loss)
    assert is_idle(pair.sharded)


def on_flat(pair: Pair, make: Any) -> Pair:
    pair.optimizer = make(fsdp_core.flat_parameters(pair.sharded))
    pair.plain_optimizer = make(pair.plain.parameters())
    return pair


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# Terms of the loss that look at parameters themselves ----------------------------------------------------------------


def squares(model: nn.Module) -> Tensor:
    return sum((p.pow(2).sum() for p in model.parameters()), torch.zeros(()))


def penalty_last(model: nn.Module, batch: Tensor) -> Tensor:
    return mean_square(model, batch) + 0.1 * squares(model)


def penalty_first(model: nn.Module, batch: Tensor) -> Tensor:
    penalty = 0.1 * squares(model)
    return penalty + mean_square(model, batch)


class Deep(nn.Module):
    def __init__(self, depth: int = 7) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@program
def a_penalty_on_parameters_after_the_forward(rank: Rank, options: dict[str, Any]) -> None:
    steps(Pair(Deep(), units=[nn.Linear], lr=0.1, **options), rank, penalty_last)


@program
def a_penalty_on_parameters_before_the_forward(rank: Rank, options: dict[str, Any]) -> None:
    steps(Pair(Deep(), units=[nn.Linear], lr=0.1, **options), rank, penalty_first)


@program
def a_penalty_with_flat_parameters(rank: Rank, options: dict[str, Any]) -> None:
    for loss in (penalty_last, penalty_first):
        steps(on_flat(Pair(Deep(), units=[nn.Linear], **options), sgd), rank, loss)


@program
def a_penalty_in_every_micro_batch(rank: Rank, options: dict[str, Any]) -> None:
    for flat in (False, True):
        for loss in (penalty_last, penalty_first):
            pair = Pair(Deep(), units=[nn.Linear], lr=0.1, **options)
            if flat:
                on_flat(pair, sgd)
            for step in range(2):
                for micro in range(3):
                    batches = batches_for(rank.world_size, 3, 4, seed=10 * step + micro)
                    pair.plain_gradients(batches, loss)
                    if micro < 2:
                        with fsdp_core.no_sync(pair.sharded):
                            loss(pair.sharded, batches[rank.rank]).backward()
                    else:
                        loss(pair.sharded, batches[rank.rank]).backward()
                pair.finish_step()
            assert is_idle(pair.sharded)


# One step each: P penalty alone, L loss, M both in one backward, F and B a loss whose backward comes later; n: inside
# no_sync; 0 and z: zero_grad, to None and in place.
PENALTY_STEPS = ("P", "P P", "L P", "P L", "M P", "F P B", "nP P", "nP L", "nL nP P", "nL nP 0 P", "nL nP z nL P")


def penalty_step(pair: Pair, rank: Rank, step: str) -> None:
    later: list[Tensor] = []
    for index, action in enumerate(step.split()):
        batches = batches_for(rank.world_size, 3, 4, seed=index)
        what = action[-1]
        if what in "0z":
            for one in (pair.optimizer, pair.plain_optimizer):
                one.zero_grad(set_to_none=what == "0")
            continue
        losses = []
        for model, own in ((pair.plain, batches), (pair.sharded, batches[rank.rank : rank.rank + 1])):
            loss = 0.1 * squares(model) if what in "PM" else torch.zeros(())
            losses.append(loss + sum(mean_square(model, b) for b in own) / len(own) if what in "LMF" else loss)
        if what == "F":
            later = losses
            continue
        with fsdp_core.no_sync(pair.sharded) if action[0] == "n" else contextlib.nullcontext():
            for one in later if what == "B" else losses:
                one.backward()
    pair.check_gradients()
    expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.3)
    torch.testing.assert_close(fsdp_core.clip_grad_norm_(pair.sharded, 0.3), expected)
    pair.finish_step()
    assert is_idle(pair.sharded)


@program
def a_backward_of_a_penalty_alone(rank: Rank, options: dict[str, Any]) -> None:
    for flat in (False, True):
        pair = Pair(Deep(3), units=[nn.Linear], lr=0.1, **options)
        if flat:
            on_flat(pair, sgd)
        for step in PENALTY_STEPS:
            penalty_step(pair, rank, step)


@program
def a_penalty_whose_gradient_is_whole(rank: Rank, options: dict[str, Any]) -> None:
    """Of a sum, or of a product with other values, autograd makes a plain tensor."""

    def ramp(model: nn.Module) -> Tensor:
        terms = [(p * torch.arange(p.numel()).reshape(p.shape)).sum() + p.sum() for p in model.parameters()]
        return 0.01 * torch.stack(terms).sum()

    for flat in (False, True):
        pair = Pair(Deep(3), units=[nn.Linear], lr=0.1, **options)
        if flat:
            on_flat(pair, sgd)
        for loss in (lambda m, b: ramp(m), lambda m, b: mean_square(m, b) + ramp(m), lambda m, b: ramp(m)):
            steps(pair, rank, loss, count=1)


@program
def hooks_on_parameters_that_a_penalty_looks_at(rank: Rank, options: dict[str, Any]) -> None:
    """A tensor hook sees the penalty's gradient and the reduced one; a post-accumulate hook is called once."""
    for flat in (False, True):
        for loss in (lambda m, b: 0.1 * squares(m), penalty_last):
            calls: list[Tensor] = []
            model = Deep(3)
            first = model.layers[0].weight  # its hooks are there before it is sharded
            first.register_hook(lambda grad: grad * 0.5)
            first.register_post_accumulate_grad_hook(calls.append)
            pair = Pair(model, units=[nn.Linear], lr=0.1, **options)
            if flat:
                on_flat(pair, sgd)
            pair.plain.layers[0].weight.register_hook(lambda grad: grad * 0.5)
            for one in (pair.sharded, pair.plain):
                for parameter in list(one.parameters())[1:]:
                    parameter.register_hook(lambda grad: grad * 0.5)
            for parameter in list(pair.sharded.parameters())[1:]:
                parameter.register_post_accumulate_grad_hook(calls.append)
            steps(pair, rank, loss)
            assert len(calls) == 2 * len(list(pair.plain.parameters()))


@program
def a_backward_with_a_penalty_that_fails(rank: Rank, options: dict[str, Any]) -> None:
    """What the penalty has left: nothing, or (by name, as in plain training) something that must be cleared."""
    for flat, clears in itertools.product((False, True), (False, True)):
        pair = Pair(Fragile(4), units=[nn.Linear], lr=0.1, **options)
        if flat:
            on_flat(pair, sgd)
        batches = batches_for(rank.world_size, 3, 4)

        def run(p: Pair = pair, b: Any = batches) -> None:
            penalty_last(p.sharded, b[rank.rank]).backward()

        Explodes.armed = True
        message_of(run, ValueError)
        Explodes.armed = False
        if clears:
            pair.optimizer.zero_grad()
        elif not flat:
            assert "zero_grad" in message_of(run, StateError)
            pair.optimizer.zero_grad()
        steps(pair, rank, penalty_last)


@program
def a_distance_to_other_values(rank: Rank, options: dict[str, Any]) -> None:
    pair = tower(options, lr=0.1)
    start = {name: value.detach().clone() for name, value in pair.plain.named_parameters()}

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        away = sum(((p - start[name]) ** 2).sum() for name, p in model.named_parameters())
        return mean_square(model, batch) + 0.3 * away

    steps(pair, rank, loss, count=3)


# Autograd inside the forward -----------------------------------------------------------------------------------------


class Forces(nn.Module):
    """Energy and its gradient with respect to the input, which later layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.gain = nn.Parameter(torch.randn(4, 4))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.inner(torch.tanh(x @ self.gain)).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.last(force @ self.gain)


@program
def gradients_of_inputs_inside_the_forward(rank: Rank, options: dict[str, Any]) -> None:
    model = Forces()
    pair = Pair(model, units=[model.inner, model.last], lr=0.1, **options)
    steps(pair, rank, count=3)
    x = batches_for(1, 3, 4, seed=9)[0]
    with torch.no_grad():
        torch.testing.assert_close(pair.sharded(x), pair.plain(x))
    steps(pair, rank, first=5)


class Teacher(nn.Module):
    """The same block without gradients (a target) and with them."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.last(torch.tanh(self.block(x * 2)))
        found = self.last(torch.tanh(self.block(x)))
        with torch.no_grad():
            again = self.block(x)
        return found - target + again


@program
def a_block_with_and_without_gradients(rank: Rank, options: dict[str, Any]) -> None:
    model = Teacher()
    steps(Pair(model, units=[model.block, model.last], **options), rank)


@program
def a_graph_of_parameter_gradients_then_training(rank: Rank, options: dict[str, Any]) -> None:
    pair = tower(options)
    batch = batches_for(rank.world_size, 3, 4)[rank.rank]
    for ask in (
        lambda: mean_square(pair.sharded, batch).backward(create_graph=True),
        lambda: torch.autograd.grad(
            mean_square(pair.sharded, batch), list(pair.sharded.parameters()), create_graph=True
        ),
        lambda: torch.autograd.grad(mean_square(pair.sharded, batch), [pair.sharded.last.bias], create_graph=True),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            message = message_of(ask, StateError)
        assert "create_graph" in message and "unit: " in message
        assert all(p.grad is None for p in pair.sharded.parameters())
    steps(pair, rank)
    with fsdp_core.no_sync(pair.sharded):
        message_of(lambda: mean_square(pair.sharded, batch).backward(create_graph=True), StateError)
    steps(pair, rank, first=4)


def hessian_penalty(model: nn.Module, batch: Tensor) -> Tensor:
    loss = mean_square(model, batch)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(g.pow(2).sum() for g in grads)


@program
def what_the_message_about_create_graph_advises(rank: Rank, options: dict[str, Any]) -> None:
    pair = tower(options)
    batches = batches_for(rank.world_size, 3, 4)
    hessian_penalty(pair.plain, batches[0]).backward()
    with fsdp_core.full_parameters(pair.sharded, writeback=False):
        hessian_penalty(pair.sharded, batches[0]).backward()
        for (name, p), (_, q) in zip(pair.sharded.named_parameters(), pair.plain.named_parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)
    pair.plain.zero_grad()
    steps(pair, rank)


# Errors and interruptions --------------------------------------------------------------------------------------------


class FallsBack(nn.Module):
    """The parent catches what its child raises and takes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.risky, self.safe, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.risky.register_forward_pre_hook(self._refuse)

    def _refuse(self, module: nn.Module, args: Any) -> None:
        raise ValueError("not today")

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.risky(x)
        except ValueError:
            x = self.safe(x)
        return self.last(x)


@program
def a_parent_that_catches_its_childs_error(rank: Rank, options: dict[str, Any]) -> None:
    model = FallsBack()
    steps(Pair(model, units=[model.risky, model.safe], **options), rank)


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        if self.error is not None:
            raise self.error
        return self.b(x)


@program
def an_interrupted_forward_then_training(rank: Rank, options: dict[str, Any]) -> None:
    for place in ("root", "unit"):
        model = Interrupted() if place == "root" else nn.Sequential(Interrupted(), nn.Linear(4, 3))
        inner = model if place == "root" else model[0]
        units = [inner.a, inner.b] if place == "root" else [inner, inner.a]
        pair = Pair(model, units=units, **options)
        steps(pair, rank)
        inner.error = KeyboardInterrupt
        message_of(lambda p=pair: p.sharded(torch.ones(2, 4)), KeyboardInterrupt)
        inner.error = None
        steps(pair, rank, count=3, first=3)


@program
def a_hook_on_a_parameter_that_raises(rank: Rank, options: dict[str, Any]) -> None:
    for register in ("register_post_accumulate_grad_hook", "register_hook"):
        pair = tower(options)
        steps(pair, rank)
        is_bad = [True]

        def hook(value: Tensor, is_bad: list[bool] = is_bad) -> None:
            if is_bad[0]:
                raise ValueError("in a hook")

        getattr(pair.sharded.inner[0].weight, register)(hook)
        batch = batches_for(rank.world_size, 3, 4, seed=7)[rank.rank]
        message_of(lambda p=pair, b=batch: mean_square(p.sharded, b).backward(), ValueError)
        is_bad[0] = False
        pair.sharded.zero_grad()
        steps(pair, rank, first=3)


class Explodes(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Explodes.armed:
            raise ValueError("in backward")
        return grad


class Fragile(Deep):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == 2:
                x = Explodes.apply(x)
        return x


@program
def a_micro_batch_that_fails_and_is_run_again(rank: Rank, options: dict[str, Any]) -> None:
    """Its first half is in the sums already. They must not be used as if it were not."""
    for fails_in, clears_late, sends in itertools.product((0, 1, 2), (False, True), (False, True)):
        leaves_a_part = not sends or fails_in > 0
        pair = Pair(Fragile(8), units=[nn.Linear], lr=0.1, **options)
        for attempt in range(2):
            for micro in range(3):
                batches = batches_for(rank.world_size, 3, 4, seed=micro)
                if attempt == 1:
                    pair.plain_gradients(batches, mean_square)

                def run(p: Pair = pair, b: Any = batches) -> None:
                    mean_square(p.sharded, b[rank.rank]).backward()

                with contextlib.nullcontext() if sends or micro == 2 else fsdp_core.no_sync(pair.sharded):
                    if attempt == 0 and micro == fails_in:
                        Explodes.armed = True
                        message_of(run, ValueError)
                        Explodes.armed = False
                        if clears_late and leaves_a_part:
                            message = message_of(run, StateError)
                            assert "zero_grad" in message and "unit: " in message
                        if leaves_a_part:
                            pair.sharded.zero_grad()
                            break
                        assert all(p.grad is None for p in pair.sharded.parameters())
                        break
                    run()
        pair.finish_step()
        steps(pair, rank, first=5)


# Accumulation without communication, misused -------------------------------------------------------------------------


@program
def a_step_on_gradients_that_were_never_sent(rank: Rank, options: dict[str, Any]) -> None:
    for face in ("named", "flat"):
        pair = tower(options)
        if face == "flat":
            on_flat(pair, sgd)
        with fsdp_core.no_sync(pair.sharded):
            mean_square(pair.sharded, batches_for(rank.world_size, 3, 4)[rank.rank]).backward()
        for use in (
            pair.optimizer.step,
            lambda p=pair: fsdp_core.clip_grad_norm_(p.sharded, 1.0),
        ):
            message = message_of(use, StateError)
            assert "no_sync" in message and "unit: " in message
        pair.optimizer.zero_grad()
        pair.optimizer.step()  # cleared: nothing is lost
        steps(pair, rank)


@program
def gradients_scaled_while_their_sum_is_kept(rank: Rank, options: dict[str, Any]) -> None:
    for face in ("named", "flat"):
        pair = tower(options)
        if face == "flat":
            on_flat(pair, sgd)
        batches = batches_for(rank.world_size, 3, 4)
        with fsdp_core.no_sync(pair.sharded):
            mean_square(pair.sharded, batches[rank.rank]).backward()
        for group in pair.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        message = message_of(lambda p=pair, b=batches: mean_square(p.sharded, b[rank.rank]).backward(), StateError)
        assert "no_sync" in message
        pair.optimizer.zero_grad()
        steps(pair, rank)


@program
def units_that_only_earlier_micro_batches_used(rank: Rank, options: dict[str, Any]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, side: str) -> Tensor:
            return getattr(self, side)(x)

    model = Two()
    pair = Pair(model, units=[model.left, model.right], **options)
    for step in range(2):
        for micro, side in enumerate(("left", "left", "right")):
            batches = batches_for(rank.world_size, 3, 4, seed=10 * step + micro)

            def loss(m: nn.Module, b: Tensor, side: str = side) -> Tensor:
                return m(b, side).pow(2).mean()

            pair.plain_gradients(batches, loss)
            if micro < 2:
                with fsdp_core.no_sync(pair.sharded):
                    loss(pair.sharded, batches[rank.rank]).backward()
            else:
                loss(pair.sharded, batches[rank.rank]).backward()
        pair.finish_step()
    assert is_idle(pair.sharded)


# Copies --------------------------------------------------------------------------------------------------------------


def twin_of(pair: Pair) -> Pair:
    other = Pair(nn.Linear(1, 1))
    plain_grads = [p.grad for p in pair.plain.parameters()]
    other.sharded, other.plain = copy.deepcopy(pair.sharded), copy.deepcopy(pair.plain)
    for parameter, grad in zip(other.plain.parameters(), plain_grads, strict=True):
        parameter.grad = None if grad is None else grad.clone()
    other.optimizer, other.plain_optimizer = sgd(other.sharded.parameters()), sgd(other.plain.parameters())
    return other


@program
def a_copy_made_while_sums_are_kept(rank: Rank, options: dict[str, Any]) -> None:
    for flat in (False, True):
        pair = tower(options)
        if flat:
            on_flat(pair, sgd)
        first, second = batches_for(rank.world_size, 3, 4), batches_for(rank.world_size, 3, 4, seed=1)
        pair.plain_gradients(first, mean_square)
        with fsdp_core.no_sync(pair.sharded):
            mean_square(pair.sharded, first[rank.rank]).backward()
        twin = twin_of(pair)
        for one in (twin, pair):
            one.plain_gradients(second, mean_square)
            mean_square(one.sharded, second[rank.rank]).backward()
            one.finish_step()
        steps(twin, rank, first=3)
        steps(pair, rank, first=3)


@program
def a_copy_made_between_forward_and_backward(rank: Rank, options: dict[str, Any]) -> None:
    pair = tower(options)
    batches = batches_for(rank.world_size, 3, 4)
    pair.plain_gradients(batches, mean_square)
    loss = mean_square(pair.sharded, batches[rank.rank])
    twin = twin_of(pair)
    twin.plain.zero_grad()
    loss.backward()
    pair.finish_step()
    steps(twin, rank, first=3)
    steps(pair, rank, first=3)


# Parts that several models use ---------------------------------------------------------------------------------------


class Head(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.own = trunk, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(torch.tanh(self.trunk(x)))


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        trunk = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.first, self.second = Head(trunk), Head(trunk)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


@program
def two_models_with_a_common_trunk(rank: Rank, options: dict[str, Any]) -> None:
    """Refused one after the other; under one parent they train in turn, and together."""
    for own_root in (True, False):
        both = Both()
        trunk = both.first.trunk
        if own_root:
            fsdp_core.fully_shard(trunk, **options)
        fsdp_core.fully_shard(both.first, units=None if own_root else [trunk], **options)
        message = message_of(lambda b=both: fsdp_core.fully_shard(b.second, **options), WrapError)
        assert "unit: trunk" in message and "parent" in message
    both = Both()
    pair = Pair(both, units=[both.first, both.second, both.first.trunk], lr=0.1, **options)
    for step in range(4):
        steps(pair, rank, lambda m, b, s=step: mean_square((m.first, m.second)[s % 2], b), count=1, first=step)
    steps(pair, rank, first=5)
    steps(pair, rank, lambda m, b: mean_square(m.first, b) + mean_square(m.second, b * 2), first=8)


@program
def two_roots_below_a_plain_parent(rank: Rank, options: dict[str, Any]) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Tower(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.decoder(self.encoder(x))
            return self.decoder(self.encoder(x))

    model = Parent()
    plain = copy.deepcopy(model)
    fsdp_core.fully_shard(model.encoder, units=[model.encoder.inner], **options)
    fsdp_core.fully_shard(model.decoder, units=[nn.Linear], **options)
    pair = Pair(nn.Linear(1, 1))
    pair.sharded, pair.plain = model, plain
    pair.optimizer, pair.plain_optimizer = sgd(model.parameters()), sgd(plain.parameters())
    for step in range(3):
        batches = batches_for(rank.world_size, 3, 4, seed=step)
        pair.plain_gradients(batches, mean_square)
        mean_square(model, batches[rank.rank]).backward()
        pair.check_gradients()
        for one, other in ((pair.optimizer, pair.plain_optimizer),):
            one.step()
            other.step()
            one.zero_grad()
            other.zero_grad()
    for part in ("encoder", "decoder"):
        state = fsdp_core.state_dict(getattr(model, part))
        for name, value in getattr(plain, part).state_dict().items():
            torch.testing.assert_close(state[name], value)


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = torch.tanh(self.inner(x)) * self.gain
        return x if depth == 0 else self(x, depth - 1) * self.gain


@program
def a_module_that_calls_itself(rank: Rank, options: dict[str, Any]) -> None:
    model = Recursive()
    steps(Pair(model, units=[model.inner], **options), rank)
    holder = nn.Sequential(Recursive(), nn.Linear(4, 2))
    steps(Pair(holder, units=[holder[0]], **options), rank)


# Weights in unusual places -------------------------------------------------------------------------------------------


class Returns(nn.Module):
    """Hands its weight to the parent, which uses it after this unit has been freed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.weight


class UsesReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.other = Returns(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.table(x)
        x = torch.tanh(self.other(torch.tanh(self.middle(x))))
        return x @ weight.t()


@program
def a_unit_that_returns_its_weight(rank: Rank, options: dict[str, Any]) -> None:
    model = UsesReturned()
    steps(Pair(model, units=[model.table, model.middle, model.other], lr=0.05, **options), rank, count=3)


class Collections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.some = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(4)), "b": nn.Parameter(torch.randn(4))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.some:
            x = torch.tanh(x @ weight)
        for _, bias in self.named.items():
            x = x + bias
        return x


@program
def parameter_lists_and_dicts(rank: Rank, options: dict[str, Any]) -> None:
    model = nn.Sequential(Collections(), nn.Linear(4, 2))
    steps(Pair(model, units=[model[0]], **options), rank)


@program
def a_unit_without_elements(rank: Rank, options: dict[str, Any]) -> None:
    class Empty(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0, width))

        def forward(self, x: Tensor) -> Tensor:
            return x + (x @ self.nothing.t()).sum()

    model = nn.Sequential(Empty(4), nn.Linear(4, 2), Empty(2))
    steps(Pair(model, units=[Empty, nn.Linear], **options), rank)


@program
def torchs_fast_path_in_evaluation(rank: Rank, options: dict[str, Any]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    pair = Pair(model, units=[nn.TransformerEncoderLayer], lr=0.1, **options)
    x = batches_for(1, 2, 3, 8)[0]
    for step in range(2):
        pair.step(rank.rank, batches_for(rank.world_size, 2, 3, 8, seed=step), mean_square, rtol=1e-4, atol=1e-5)
        for one in (pair.sharded, pair.plain):
            one.eval()
        with torch.no_grad():
            torch.testing.assert_close(pair.sharded(x), pair.plain(x), rtol=1e-4, atol=1e-5)
        for one in (pair.sharded, pair.plain):
            one.train()
    assert is_idle(pair.sharded)


# Torch's own tools around a sharded model ----------------------------------------------------------------------------


@program
def autocast(rank: Rank, options: dict[str, Any]) -> None:
    pair = tower(options)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).float().pow(2).mean()

    pair.sharded.first.requires_grad_(False)
    pair.plain.first.requires_grad_(False)
    for step in range(2):
        batches = batches_for(rank.world_size, 3, 4, seed=step)
        pair.step(rank.rank, batches, loss, rtol=2e-2, atol=2e-3)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            # values of fp32 weights differ in rounding: the same order of magnitude is enough
            torch.testing.assert_close(pair.sharded(batches[0]), pair.plain(batches[0]), rtol=2e-2, atol=2e-2)


@program
def functional_calls(rank: Rank, options: dict[str, Any]) -> None:
    pair = tower(options)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(model.named_parameters()), (batch,)).pow(2).mean()

    steps(pair, rank, loss)
    other = {name: torch.zeros(value.shape) for name, value in pair.plain.named_parameters()}
    message = message_of(lambda: torch.func.functional_call(pair.sharded, other, (torch.ones(2, 4),)), StateError)
    assert "replaced" in message
    names = dict(pair.sharded.named_parameters())
    transformed = torch.func.grad(lambda p: torch.func.functional_call(pair.sharded, p, (torch.ones(2, 4),)).sum())
    message_of(lambda: transformed(names), Exception)
    steps(pair, rank, first=4)


@program
def the_same_dropout(rank: Rank, options: dict[str, Any]) -> None:
    """The engine draws no random number of the user's."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4), nn.Dropout(0.5))
    pair = Pair(model, units=[nn.Linear], **options)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        torch.manual_seed(int(batch[0, 0].abs() * 1e6))
        model(batch)
        return model(batch).pow(2).mean()

    steps(pair, rank, loss)


@program
def activations_saved_elsewhere(rank: Rank, options: dict[str, Any]) -> None:
    pair = tower(options)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            return mean_square(model, batch)

    steps(pair, rank, loss, count=3)


@program
def full_backward_hooks_on_units(rank: Rank, options: dict[str, Any]) -> None:
    pair = tower(options)
    seen: dict[str, list[Tensor]] = {"sharded": [], "plain": []}

    def halve(kind: str) -> Any:
        def hook(module: nn.Module, grads_in: Any, grads_out: Any) -> Any:
            seen[kind].append(grads_out[0].clone())
            return (grads_in[0] * 0.5,) if grads_in[0] is not None else None

        return hook

    for kind, one in (("sharded", pair.sharded), ("plain", pair.plain)):
        one.inner.register_full_backward_hook(halve(kind))
        one.last.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,))
    steps(pair, rank)
    assert len(seen["sharded"]) == 2


@program
def a_scaler_that_unscales_and_clips(rank: Rank, options: dict[str, Any]) -> None:
    pair = tower(options, lr=0.1)
    scaler = ShardedGradScaler(pair.sharded, init_scale=64.0)
    for step in range(2):
        batches = batches_for(rank.world_size, 3, 4, seed=step)
        pair.plain_gradients(batches, mean_square)
        scaler.scale(mean_square(pair.sharded, batches[rank.rank])).backward()
        scaler.unscale_(pair.optimizer)
        pair.check_gradients()
        expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01)
        torch.testing.assert_close(fsdp_core.clip_grad_norm_(pair.sharded, 0.01), expected)
        scaler.step(pair.optimizer)
        scaler.update()
        pair.plain_optimizer.step()
        pair.check_parameters()
        pair.plain.zero_grad()
        pair.sharded.zero_grad()


# Removed, replaced, random -------------------------------------------------------------------------------------------


@program
def hooks_that_somebody_removed(rank: Rank, options: dict[str, Any]) -> None:
    x = torch.ones(2, 4)
    pair = tower(options)
    steps(pair, rank)
    pair.sharded.inner._forward_hooks.clear()
    message = message_of(lambda: pair.sharded(x), StateError)
    assert "hook" in message and "inner" in message
    pair = tower(options)
    for module in pair.sharded.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    assert "first.weight" in message_of(lambda: pair.sharded(x), StateError)


@program
def random_numbers_into_sharded_parameters(rank: Rank, options: dict[str, Any]) -> None:
    """Each rank would draw its own: parts of a parameter from one seed, or copies that differ."""
    pair = tower(options)
    weight = pair.sharded.inner[0].weight
    for draw in (
        lambda: nn.init.normal_(weight),
        lambda: nn.init.kaiming_uniform_(weight),
        lambda: torch.randn_like(weight),
        lambda: torch.bernoulli(weight.detach()),
        lambda: nn.functional.dropout(weight),
        lambda: torch.nn.functional.rrelu(weight, training=True),
    ):
        with torch.no_grad():
            message = message_of(draw, StateError)
        assert "inner.0.weight" in message, message
    nn.init.constant_(pair.sharded.last.bias, 0.5)
    nn.init.constant_(pair.plain.last.bias, 0.5)
    steps(pair, rank)


@program
def looking_at_a_sharded_parameter(rank: Rank, options: dict[str, Any]) -> None:
    weight = tower(options).sharded.inner[0].weight
    assert "inner.0.weight" in repr(weight) and weight.numel() == 42 and len(weight) == 7
    for look in (weight.tolist, lambda: weight.detach().numpy(), lambda: weight[0], lambda: list(weight)):
        message_of(look, Exception)
    for take in (weight.share_memory_, weight.__dlpack__):
        assert "inner.0.weight" in message_of(take, StateError)
    pair = tower(options)
    message_of(pair.sharded.share_memory, StateError)
    steps(pair, rank)
    pair.sharded.float().to("cpu").train()
    steps(pair, rank, first=3)


@program
def optimizer_state_from_before_sharding(rank: Rank, options: dict[str, Any]) -> None:
    for settings in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        torch.manual_seed(0)
        model = Tower()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **settings)
        mean_square(model, torch.ones(2, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
        fsdp_core.fully_shard(model, units=[model.inner], **options)
        mean_square(model, torch.ones(2, 4)).backward()
        message = message_of(optimizer.step, StateError)
        assert "parameter: " in message, message


# Freezing ------------------------------------------------------------------------------------------------------------


@program
def freezing_with_a_decaying_optimizer(rank: Rank, options: dict[str, Any]) -> None:
    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.5)

    for flat in (False, True):
        for whole_unit in (False, True):
            model = Tower()
            pair = Pair(model, units=[model.inner, model.last], optimizer=adamw, **options)
            if flat:
                on_flat(pair, adamw)
            steps_loosely(pair, rank, 0)
            for one in (pair.plain, pair.sharded):
                (one.inner if whole_unit else one.inner[0]).requires_grad_(False)
            if flat and not whole_unit:
                message = message_of(lambda p=pair: p.sharded(torch.ones(2, 4)), StateError)
                assert "inner.0." in message and "flat" in message
                pair.sharded.inner[0].requires_grad_(True)
                pair.plain.inner[0].requires_grad_(True)
            steps_loosely(pair, rank, 2)
            for one in (pair.plain, pair.sharded):
                one.inner.requires_grad_(True)
            steps_loosely(pair, rank, 4)


def steps_loosely(pair: Pair, rank: Rank, first: int) -> None:
    for step in range(first, first + 2):
        batches = batches_for(rank.world_size, 3, 4, seed=step)
        pair.step(rank.rank, batches, mean_square, rtol=1e-3, atol=1e-4)
    assert is_idle(pair.sharded)


# Other threads, other times ------------------------------------------------------------------------------------------


def in_a_thread(function: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@program
def backward_in_another_thread(rank: Rank, options: dict[str, Any]) -> None:
    model = Tower()
    pair = Pair(model, units=[model.inner, model.last], **options)
    for step in range(2):
        batches = batches_for(rank.world_size, 3, 4, seed=step)
        pair.plain_gradients(batches, mean_square)
        loss = mean_square(pair.sharded, batches[rank.rank])
        in_a_thread(loss.backward)
        pair.finish_step()
    in_a_thread(lambda: steps(pair, rank, first=3))
    steps(pair, rank, first=5)


@program
def a_graph_that_is_kept_and_used_again(rank: Rank, options: dict[str, Any]) -> None:
    model = Tower()
    pair = Pair(model, units=[model.inner, model.last], **options)
    for step in range(2):
        batches = batches_for(rank.world_size, 3, 4, seed=step)
        found = [pair.sharded(batches[rank.rank])]
        expected = [pair.plain(batch) for batch in batches]
        for outputs in (found, expected):
            for loss in (torch.square, torch.abs, torch.square):
                total = sum((loss(output).mean() for output in outputs), torch.zeros(()))
                (total / len(outputs)).backward(retain_graph=True)
        pair.finish_step()


class SavesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.kind = ""
        self.saved: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.kind:
            self.saved = fsdp_core.state_dict(self, self.kind)
        return self.last(x)


@program
def a_state_dict_in_the_middle_of_a_forward(rank: Rank, options: dict[str, Any]) -> None:
    model = SavesItself()
    pair = Pair(model, units=[model.first, model.last], **options)
    for step, kind in enumerate(("full", "sharded", "local")):
        before = {name: value.clone() for name, value in pair.plain.state_dict().items()}
        model.kind = kind
        steps(pair, rank, count=1, first=step)
        if kind == "full":
            for name, value in before.items():
                torch.testing.assert_close(model.saved[name], value)


# Changing shapes and depths ------------------------------------------------------------------------------------------


@program
def batches_of_other_sizes_and_none(rank: Rank, options: dict[str, Any]) -> None:
    pair = tower(options, lr=0.05)
    for step, sizes in enumerate([(3, 1), (0, 5), (2, 0), (7, 7)]):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randn(sizes[r % 2], 4, generator=generator) for r in range(rank.world_size)]
        pair.step(rank.rank, batches, lambda m, b: m(b).pow(2).sum())
    assert is_idle(pair.sharded)


@program
def a_depth_that_changes(rank: Rank, options: dict[str, Any]) -> None:
    class Exits(Deep):
        depth = 7

        def forward(self, x: Tensor) -> Tensor:
            for layer in list(self.layers)[: self.depth]:
                x = torch.tanh(layer(x))
            return x

    model = Exits()
    pair = Pair(model, units=[nn.Linear], **options)
    for step, depth in enumerate([7, 2, 5, 1, 7, 3]):
        Exits.depth = depth
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
        with torch.no_grad():
            Exits.depth = 7 - depth // 2
            pair.sharded(torch.ones(2, 4))
    assert is_idle(pair.sharded)


@program
def gradients_kept_by_the_user(rank: Rank, options: dict[str, Any]) -> None:
    for zero in ("none", "zero"):
        pair = tower(options)
        kept: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        for step in range(3):
            batches = batches_for(rank.world_size, 3, 4, seed=step)
            expected = {n: g.clone() for n, g in pair.plain_gradients(batches, mean_square).items()}
            mean_square(pair.sharded, batches[rank.rank]).backward()
            pair.check_gradients()
            kept.append(({n: p.grad for n, p in pair.sharded.named_parameters()}, expected))
            if zero == "none":
                pair.plain.zero_grad()
                pair.sharded.zero_grad()
        for found, expected in kept:
            for name, grad in found.items():
                if zero == "none":
                    torch.testing.assert_close(whole(grad), expected[name])
                else:  # one gradient object that grows
                    torch.testing.assert_close(whole(grad), kept[-1][1][name])


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def score(self, x: Tensor, depth: int = 1) -> Tensor:
        return self(x) + (self.score(x, depth - 1) if depth else self.layer(x).pow(2))


@program
def a_copy_of_a_model_with_forward_methods(rank: Rank, options: dict[str, Any]) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model.score(batch).pow(2).mean()

    pair = Pair(Scores(), lr=0.05, **options)
    fsdp_core.register_forward_method(pair.sharded, "score")
    steps(pair, rank, loss)
    twin = twin_of(pair)
    steps(twin, rank, loss)
    steps(pair, rank, loss, first=3)


@program
def a_penalty_where_gradients_are_sums(rank: Rank, options: dict[str, Any]) -> None:
    """It is the same on all ranks, and counts once."""
    pair = tower(options)
    fsdp_core.set_gradient_divide_factor(pair.sharded, 1.0)
    batches = batches_for(rank.world_size, 3, 4)
    sum((mean_square(pair.plain, batch) for batch in batches), 0.1 * squares(pair.plain)).backward()
    penalty_last(pair.sharded, batches[rank.rank]).backward()
    pair.finish_step()
