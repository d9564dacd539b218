"""Optimizer state by name: saved on some ranks, loaded on others, trained on as if nothing had happened."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core.errors import StateError
from fsdp_core.handle.sharded_tensor import ShardedTensor
from fsdp_core.numerics.optimizers import (
    LAMB,
    Adafactor,
    GroupRule,
    Muon,
    WholeParameterOptimizer,
    no_decay,
    parameter_groups,
)
from tests.fsdp_core.optimizers.test_on_shards import Block, Matrices, Net, parameters_of
from tests.support.parity import mean_square
from tests.support.ranks import Pools, Rank


class Momentum(torch.optim.Optimizer):
    """A user's optimizer: normalised momentum, with a tensor, a number and a list as state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["buffer"] = 0.9 * state.get("buffer", torch.zeros_like(p)) + p.grad
                state["count"] = state.get("count", 0) + 1
                state["norms"] = [*state.get("norms", []), p.grad.norm().item()][-2:]
                p.sub_(state["buffer"] / (state["buffer"].norm() + 1e-6), alpha=group["lr"])


def groups(model: nn.Module, face: str) -> list[dict[str, Any]]:
    rules = [no_decay(), GroupRule(lambda fqn, shape: ".up." in fqn, {"lr": 0.02})]
    return parameter_groups(parameters_of(model, face), rules, {"weight_decay": 0.1})


KINDS: dict[str, Callable[[nn.Module, str], torch.optim.Optimizer]] = {
    "adamw": lambda m, face: torch.optim.AdamW(parameters_of(m, face), lr=0.01, foreach=True),
    "adamw_groups": lambda m, face: torch.optim.AdamW(groups(m, face), lr=0.01, foreach=True),
    "nadam": lambda m, face: torch.optim.NAdam(parameters_of(m, face), lr=0.01, foreach=True),
    "lamb": lambda m, face: LAMB(groups(m, face), lr=0.01),
    "adafactor": lambda m, face: Adafactor(parameters_of(m, face), lr=0.01),
    "muon": lambda m, face: Muon(parameters_of(m, face), lr=0.01),
    "whole": lambda m, face: WholeParameterOptimizer(parameters_of(m, face), lambda g: Momentum(g)),
}


def new(kind: str, face: str, factor: int, units: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = Matrices() if kind == "muon" else Net()
    fsdp_core.fully_shard(model, units=[Block, nn.Linear] if units else None, sharding_factor=factor)
    return model, KINDS[kind](model, face)


def train(rank: Rank, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    """The same global batch whatever the number of ranks."""
    width = 6 if isinstance(model, Matrices) else 3
    for step in range(first, first + steps):
        batch = torch.randn(4, width, generator=torch.Generator().manual_seed(step))
        mean_square(model, batch.tensor_split(rank.world_size)[rank.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(rank: Rank, kind: str, face: str, factor: int, path: Path) -> None:
    """Two steps, save, two more; rank 0 leaves the saved state and what the uninterrupted run became."""
    model, optimizer = new(kind, face, factor, units=True)
    train(rank, model, optimizer, 0, 2)
    saved = {"model": fsdp_core.state_dict(model), "optimizer": fsdp_core.optim_state_dict(model, optimizer)}
    train(rank, model, optimizer, 2, 2)
    saved["expected"] = fsdp_core.state_dict(model)
    again = fsdp_core.optim_state_dict(model, optimizer)
    if rank.rank == 0:
        saved["expected_optimizer"] = again
        path.write_bytes(pickle.dumps(saved))


def resume(rank: Rank, kind: str, face: str, factor: int, path: Path) -> None:
    saved = pickle.loads(path.read_bytes())
    model, optimizer = new(kind, face, factor, units=False)
    train(rank, model, optimizer, 7, 1)  # a state that must not survive the loading
    fsdp_core.load_state_dict(model, saved["model"])
    fsdp_core.load_optim_state_dict(model, optimizer, saved["optimizer"])
    assert_equal(fsdp_core.optim_state_dict(model, optimizer), saved["optimizer"], exact=True)
    train(rank, model, optimizer, 2, 2)
    assert_equal(fsdp_core.state_dict(model), saved["expected"], exact=False)


def assert_equal(got: Any, expected: Any, exact: bool, where: str = "") -> None:
    if isinstance(expected, dict):
        assert set(got) == set(expected), where
        for key in expected:
            if key != "params":
                assert_equal(got[key], expected[key], exact, f"{where}.{key}")
    elif isinstance(expected, Tensor):
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-3, "atol": 2e-4}
        torch.testing.assert_close(got, expected, msg=lambda m: f"{where}: {m}", **tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), where
        for position, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_equal(one, other, exact, f"{where}[{position}]")
    else:
        assert got == expected, where


@pytest.mark.parametrize(
    ("kind", "faces"),
    [*((kind, ("flat", "named")) for kind in KINDS), ("adamw", ("named", "flat")), ("adafactor", ("named", "flat"))],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_save_on_four_ranks_resume_on_two(ranks: Pools, tmp_path: Path, kind: str, faces: tuple[str, str]) -> None:
    """Saved under other units, another F and the other face."""
    path = tmp_path / "state"
    ranks(4).run(save, kind, faces[0], 4, path)
    ranks(2).run(resume, kind, faces[1], 2, path)


@pytest.mark.parametrize("kind", ["adamw_groups", "adafactor", "whole"])
def test_resume_on_one_rank_without_process_group(ranks: Pools, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state"
    ranks(2).run(save, kind, "flat", 2, path)
    resume(Rank(0, 1, None), kind, "flat", 1, path)  # type: ignore[arg-type]


def names_and_shapes(rank: Rank, kind: str, state_kind: str) -> dict[str, dict[str, Any]]:
    model, optimizer = new(kind, "flat", 2, units=True)
    train(rank, model, optimizer, 0, 1)
    state = fsdp_core.optim_state_dict(model, optimizer, state_kind)["state"]
    return {
        name: {
            key: (tuple(value.shape), isinstance(value, ShardedTensor)) if isinstance(value, Tensor) else value
            for key, value in values.items()
        }
        for name, values in state.items()
    }


def test_the_state_of_adafactor_reads_like_torchs(ranks: Pools) -> None:
    first, second = ranks(2).run(names_and_shapes, "adafactor", "full")
    assert first == second
    assert first["first.weight"] == {"step": ((), False), "row_var": ((7, 1), False), "col_var": ((1, 3), False)}
    assert first["mix"]["row_var"] == ((3, 7, 1), False)
    assert first["first.bias"] == {"step": ((), False), "variance": ((7,), False)}
    assert first["scale"] == {"step": ((), False), "variance": ((), False)}


def test_sharded_state_keeps_parts_apart(ranks: Pools) -> None:
    first, second = ranks(2).run(names_and_shapes, "adamw_groups", "sharded")
    assert first == second
    assert first["turned"] == {"step": ((), False), "exp_avg": ((3, 5), True), "exp_avg_sq": ((3, 5), True)}
    owners = ranks(2).run(names_and_shapes, "whole", "sharded")
    assert set(owners[0]).isdisjoint(owners[1])
    assert set(owners[0]) | set(owners[1]) == set(first)


def load_into(rank: Rank, factor: int, path: Path) -> None:
    model, optimizer = new("adamw", "flat", factor, units=True)
    train(rank, model, optimizer, 0, 1)
    state = fsdp_core.optim_state_dict(model, optimizer, "sharded")
    fsdp_core.load_optim_state_dict(model, optimizer, state)  # the same shards: fine
    other, its_optimizer = new("adamw", "flat", 1, units=True)
    with pytest.raises(StateError, match="saved with other shards"):
        fsdp_core.load_optim_state_dict(other, its_optimizer, state)


def test_a_sharded_state_of_other_shards_is_refused(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(load_into, 2, tmp_path)


def own_state_dict(rank: Rank) -> None:
    model, optimizer = new("whole", "flat", 2, units=True)
    train(rank, model, optimizer, 0, 2)
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    values = fsdp_core.state_dict(model)
    train(rank, model, optimizer, 2, 1)
    expected = fsdp_core.state_dict(model)
    fsdp_core.load_state_dict(model, values)
    optimizer.load_state_dict(saved)
    train(rank, model, optimizer, 2, 1)
    assert_equal(fsdp_core.state_dict(model), expected, exact=True)


def test_the_wrapped_optimizers_own_state_dict(ranks: Pools) -> None:
    ranks(2).run(own_state_dict)


def test_copies() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = LAMB([weight], lr=0.1)
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    (other,) = twin.param_groups[0]["params"]
    other.grad = torch.ones(2, 2)
    twin.step()
    optimizer.step()
    assert torch.equal(other, weight)
    with pytest.raises(StateError, match="tied to its ranks"):
        copy.deepcopy(WholeParameterOptimizer([weight], Momentum))


@pytest.mark.parametrize("make", [LAMB, Adafactor, functools.partial(Muon, lr=0.1)], ids=["lamb", "adafactor", "muon"])
def test_torchs_own_state_dict_round_trip(make: Any) -> None:
    def run(reload: bool) -> Tensor:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(3, 4))
        optimizer = make([weight])
        for step in range(4):
            weight.grad = torch.full((3, 4), 0.5 + step)
            optimizer.step()
            if reload and step == 1:
                saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
                optimizer = make([weight])
                optimizer.load_state_dict(saved)
        return weight.detach()

    assert torch.equal(run(reload=True), run(reload=False))
