"""Every optimizer of this package on shards gives the unsharded result: any F, both faces of the parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_core
from fsdp_core.numerics.optimizers import (
    LAMB,
    Adafactor,
    FlatSlice,
    GroupRule,
    Muon,
    WholeParameterOptimizer,
    no_decay,
    parameter_groups,
)
from tests.fsdp_core.optimizers.references import NormalisedGradient, ReferenceLAMB
from tests.support.ranks import Pools, Rank

FACES = ["flat", "named"]
TIGHT = {"rtol": 2e-5, "atol": 2e-6}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Uneven matrices, vectors, a 0-dim scale, a stack of matrices, a transposed one: shards cut all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(2))
        self.mix = nn.Parameter(torch.randn(3, 7, 5) * 0.3)
        self.turned = nn.Parameter((torch.randn(5, 3) * 0.3).t())
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return torch.einsum("bi,kij->bkj", x, self.mix).sum(1) @ self.turned.t() * self.scale


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 9, bias=False)
        self.b = nn.Linear(9, 4, bias=False)
        self.c = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def parameters_of(model: nn.Module, face: str) -> list[nn.Parameter]:
    return list(fsdp_core.flat_parameters(model) if face == "flat" else model.parameters())


def train_both(
    rank: Rank,
    model: nn.Module,
    units: list[type],
    factor: int,
    sharded_optimizer: Callable[[nn.Module], Any],
    plain_optimizer: Callable[[nn.Module], Any],
    width: int,
    steps: int = 4,
    tolerance: dict[str, float] | None = None,
) -> Any:
    """Train a sharded model beside a plain one; compare parameters after every step."""
    plain = copy.deepcopy(model)
    sharded = fsdp_core.fully_shard(model, units=units, sharding_factor=factor)
    optimizer, reference = sharded_optimizer(sharded), plain_optimizer(plain)
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        batches = [torch.randn(4, width, generator=generator) for _ in range(rank.world_size)]
        (sum(plain(b).pow(2).mean() for b in batches) / rank.world_size).backward()
        sharded(batches[rank.rank]).pow(2).mean().backward()
        reference.step()
        optimizer.step()
        reference.zero_grad()
        optimizer.zero_grad()
        state = fsdp_core.state_dict(sharded)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, msg=lambda m, n=name: f"{n}: {m}", **(tolerance or TIGHT))
    return sharded, optimizer


def lamb(rank: Rank, factor: int, face: str) -> None:
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    for extra in ({}, {"max_trust_ratio": 0.5}):
        train_both(
            rank,
            Net(),
            [Block],
            factor,
            lambda m, o={**options, **extra}: LAMB(parameters_of(m, face), **o),
            lambda m, o={**options, **extra}: ReferenceLAMB(m.parameters(), **o),
            3,
        )


def adafactor(rank: Rank, factor: int, face: str) -> None:
    for options in ({"lr": 0.05}, {"lr": 0.01, "weight_decay": 0.1, "d": 2.0, "eps": (1e-4, 1e-2)}):
        train_both(
            rank,
            Net(),
            [Block],
            factor,
            lambda m, o=options: Adafactor(parameters_of(m, face), **o),
            lambda m, o=options: torch.optim.Adafactor(m.parameters(), **o),
            3,
        )


def muon(rank: Rank, factor: int, face: str) -> None:
    for options in ({"lr": 0.02}, {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}):
        train_both(
            rank,
            Matrices(),
            [nn.Linear],
            factor,
            lambda m, o=options: Muon(parameters_of(m, face), **o),
            lambda m, o=options: torch.optim.Muon(m.parameters(), **o),
            6,
            tolerance={"rtol": 1e-3, "atol": 4e-4},  # gradients differ in the last bit, and bfloat16 rounds them apart
        )


def whole_parameters(rank: Rank, factor: int, face: str) -> None:
    train_both(
        rank,
        Net(),
        [Block],
        factor,
        lambda m: WholeParameterOptimizer(parameters_of(m, face), lambda groups: NormalisedGradient(groups, lr=0.1)),
        lambda m: NormalisedGradient(m.parameters(), lr=0.1),
        3,
    )


@pytest.mark.parametrize(
    ("world_size", "factor", "face"),
    [(2, 1, "flat"), (2, 2, "flat"), (2, 2, "named"), (3, 3, "named"), (4, 2, "named"), (4, 4, "flat")],
)
@pytest.mark.parametrize("case", [lamb, adafactor, muon, whole_parameters])
def test_same_result_as_unsharded(ranks: Pools, case: Any, world_size: int, factor: int, face: str) -> None:
    ranks(world_size).run(case, factor, face)


# -- groups by name -----------------------------------------------------------------------------------------------


def decay_groups(model: nn.Module, face: str) -> list[dict[str, Any]]:
    """The sharded model's parameters in three groups that alternate inside every unit."""
    rules = [no_decay(), GroupRule(lambda fqn, shape: fqn.startswith("blocks.1.up"), {"lr": 0.2})]
    parameters = model.named_parameters() if face == "plain" else parameters_of(model, face)
    return parameter_groups(parameters, rules, {"weight_decay": 0.3})


def groups_by_name(rank: Rank, factor: int, face: str, kind: str) -> None:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        if kind == "lamb":
            return LAMB(groups, lr=0.1)
        return torch.optim.AdamW(groups, lr=0.1, fused=kind == "fused", foreach=kind == "foreach")

    def reference(model: nn.Module) -> torch.optim.Optimizer:
        groups = decay_groups(model, "plain")
        return ReferenceLAMB(groups, lr=0.1) if kind == "lamb" else make(groups)

    sharded, optimizer = train_both(
        rank,
        Net(),
        [Block],
        factor,
        lambda m: make(decay_groups(m, face)),
        reference,
        3,
        tolerance={"rtol": 2e-4, "atol": 1e-4},
    )
    shapes = [[tuple(p.shape) for p in g["params"]] for g in optimizer.param_groups]
    assert len(shapes) == 3
    if face == "flat":
        assert any(isinstance(p, FlatSlice) for g in optimizer.param_groups for p in g["params"])
        covered = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
        assert covered == sum(s.span.numel for f in fsdp_core.flat_parameters(sharded) for s in f.segments)


@pytest.mark.parametrize("kind", ["sgd", "foreach", "fused", "lamb"])
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("world_size", "factor"), [(2, 2), (4, 4)])
def test_decay_only_where_asked(ranks: Pools, world_size: int, factor: int, face: str, kind: str) -> None:
    ranks(world_size).run(groups_by_name, factor, face, kind)


def matrices_to_muon_rest_to_adamw(rank: Rank, factor: int) -> None:
    """Two optimizers on slices of the same flat parameters."""

    class Both:
        def __init__(self, model: nn.Module, muon_kind: Any) -> None:
            rule = GroupRule(lambda fqn, shape: len(shape) == 2, {"lr": 0.02})
            source = model.named_parameters() if muon_kind is torch.optim.Muon else fsdp_core.flat_parameters(model)
            rest, matrices = parameter_groups(source, [rule])
            self.both = [muon_kind([matrices]), torch.optim.AdamW([rest], lr=0.01, foreach=True)]

        def step(self) -> None:
            for one in self.both:
                one.step()

        def zero_grad(self) -> None:
            for one in self.both:
                one.zero_grad()

    train_both(
        rank,
        Net(),
        [Block],
        factor,
        lambda m: Both(m, Muon),
        lambda m: Both(m, torch.optim.Muon),
        3,
        tolerance={"rtol": 1e-3, "atol": 4e-4},
    )


@pytest.mark.parametrize(("world_size", "factor"), [(2, 2), (4, 2)])
def test_two_optimizers_share_a_flat_parameter(ranks: Pools, world_size: int, factor: int) -> None:
    ranks(world_size).run(matrices_to_muon_rest_to_adamw, factor)


# -- on one rank --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [lamb, adafactor, muon, whole_parameters])
@pytest.mark.parametrize("face", FACES)
def test_one_rank_without_process_group(case: Any, face: str) -> None:
    torch.manual_seed(0)
    case(Rank(0, 1, None), 1, face)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ours", "reference", "tolerance"),
    [
        (lambda p: LAMB(p, lr=0.05), lambda p: ReferenceLAMB(p, lr=0.05), TIGHT),
        (lambda p: Adafactor(p, lr=0.05), lambda p: torch.optim.Adafactor(p, lr=0.05), TIGHT),
        (
            lambda p: WholeParameterOptimizer(p, lambda groups: NormalisedGradient(groups)),
            NormalisedGradient,
            {"rtol": 0, "atol": 0},
        ),
    ],
    ids=["lamb", "adafactor", "whole"],
)
def test_plain_parameters(ours: Any, reference: Any, tolerance: dict[str, float]) -> None:
    torch.manual_seed(1)
    model = Net()
    twin = copy.deepcopy(model)
    optimizer, other = ours(model.parameters()), reference(twin.parameters())
    for _ in range(3):
        for m, o in ((model, optimizer), (twin, other)):
            m(torch.ones(2, 3)).pow(2).mean().backward()
            o.step()
            o.zero_grad()
    for mine, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, **tolerance)


def test_muon_on_plain_matrices_has_the_bits_of_torch() -> None:
    torch.manual_seed(1)
    model = Matrices()
    twin = copy.deepcopy(model)
    optimizer, other = Muon(model.parameters()), torch.optim.Muon(twin.parameters())
    for _ in range(3):
        for m, o in ((model, optimizer), (twin, other)):
            m(torch.ones(2, 6)).pow(2).mean().backward()
            o.step()
            o.zero_grad()
    for mine, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, expected)


def test_a_scheduler_reaches_the_wrapped_optimizer() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = WholeParameterOptimizer([weight], lambda groups: NormalisedGradient(groups, lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for lr in (1.0, 0.5, 0.25):
        before = weight.detach().clone()
        weight.grad = torch.tensor([3.0, 4.0])
        optimizer.step()
        scheduler.step()
        torch.testing.assert_close(before - weight.detach(), lr * torch.tensor([0.6, 0.8]))
