"""Behaviours of structure: tied weights, reused modules, what may be a unit, names, dtypes, ranks that differ."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core.errors import MismatchError, WrapError
from tests.fsdp_core.behaviours.variants import Tower, every_variant, message_of, two_variants
from tests.support.parity import Pair, batches_for, is_idle, mean_square, whole
from tests.support.ranks import Pools, Rank


class TiedLanguageModel(nn.Module):
    """Embedding and head share one weight; both are units of their own when wrapped apart."""

    def __init__(self, vocabulary: int, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def _token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


def _tokens(world_size: int, vocabulary: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (3, 5), generator=generator) for _ in range(world_size)]


# B01 ----------------------------------------------------------------------------------------------------------------


def _tied_over_units(rank: Rank, options: dict[str, Any]) -> int:
    model = TiedLanguageModel(9)
    pair = Pair(model, units=[model.embedding, model.body, model.head], **options)
    assert pair.sharded.head.weight is pair.sharded.embedding.weight
    for step in range(3):
        pair.step(rank.rank, _tokens(rank.world_size, 9, step), _token_loss)
    assert is_idle(pair.sharded)
    report = fsdp_core.describe(pair.sharded)
    (name, nbytes, places), *others = report.lifted
    assert not others and name == "embedding.weight" and places == ("embedding.weight", "head.weight")
    assert set(fsdp_core.state_dict(model)) == set(pair.plain.state_dict())
    return nbytes


@every_variant
def test_b01_tied_weights_over_two_units_are_lifted(ranks: Pools, options: dict[str, Any]) -> None:
    assert ranks(2).run(_tied_over_units, options) == [9 * 6 * 4] * 2


def _tied_across_calls(rank: Rank) -> str:
    model = TiedLanguageModel(9)
    fsdp_core.fully_shard(model.embedding, wire="collectives")
    return message_of(lambda: fsdp_core.fully_shard(model, wire="collectives"), WrapError)


def test_b01_tied_weights_across_two_calls_are_refused_with_both_paths(ranks: Pools) -> None:
    for message in ranks(2).run(_tied_across_calls):
        assert "head.weight" in message and "sharded as weight" in message


# B02 ----------------------------------------------------------------------------------------------------------------


def _tied_uneven(rank: Rank, options: dict[str, Any]) -> None:
    vocabulary = 4 * rank.world_size + 1
    model = TiedLanguageModel(vocabulary)
    before = model.embedding.weight.detach().clone()
    pair = Pair(model, optimizer=lambda p: torch.optim.AdamW(p, lr=0.05), **options)
    for step in range(10):
        pair.plain_gradients(batches := _tokens(rank.world_size, vocabulary, step), _token_loss)
        _token_loss(pair.sharded, batches[rank.rank]).backward()
        pair.finish_step(rtol=1e-4, atol=1e-5)
    moved = (fsdp_core.state_dict(pair.sharded)["embedding.weight"] - before).abs().amin(dim=1)
    assert (moved > 0).all()


@two_variants
def test_b02_every_row_of_an_uneven_tied_vocabulary_trains(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_tied_uneven, options)


# B03 ----------------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.alias = self.encoder
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.alias(torch.tanh(self.encoder(x))))


def _one_module_twice(rank: Rank, options: dict[str, Any]) -> int:
    model = Twice()
    pair = Pair(model, units=[model.encoder], **options)
    log = fsdp_core.start_trace(pair.sharded)
    for step in range(2):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
    assert set(fsdp_core.state_dict(model)) == set(pair.plain.state_dict())
    assert len(fsdp_core.describe(model).units) == 2
    return len([event for event in log.events if event.kind == "reduce" and event.unit == "encoder"])


@every_variant
def test_b03_a_module_under_two_names_is_one_unit_and_reduces_once(ranks: Pools, options: dict[str, Any]) -> None:
    assert ranks(2).run(_one_module_twice, options) == [2, 2]


# B04, B05 -----------------------------------------------------------------------------------------------------------


def test_b04_a_container_without_forward_cannot_be_a_unit() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2)])})
    holder = Tower()
    holder.blocks = model["blocks"]
    with pytest.raises(ValueError, match=r"ModuleList has no forward[\s\S]*unit: blocks"):
        fsdp_core.fully_shard(holder, units=[holder.blocks])
    with pytest.raises(ValueError, match="ModuleDict has no forward"):
        fsdp_core.fully_shard(model)


def test_b05_sharding_twice_or_the_root_first_is_refused() -> None:
    model = fsdp_core.fully_shard(Tower())
    with pytest.raises(WrapError, match="sharded already"):
        fsdp_core.fully_shard(model)
    with pytest.raises(
        WrapError, match=r"part of a unit already[\s\S]*weight[\s\S]*children sharded before their parents"
    ):
        fsdp_core.fully_shard(model.first)
    other = Tower()
    fsdp_core.fully_shard(other.inner)
    with pytest.raises(WrapError, match=r"sharded already[\s\S]*inner"):
        fsdp_core.fully_shard(other, units=[other.inner])
    with pytest.raises(WrapError, match=r"two units"):
        fsdp_core.fully_shard(tower := Tower(), units=[tower.first, (tower.first, tower.last)])


# B06 ----------------------------------------------------------------------------------------------------------------


def _names_and_shapes(rank: Rank, options: dict[str, Any]) -> list[list[tuple[str, tuple[int, ...]]]]:
    model = Tower()
    expected = [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    classes = [type(module) for module in model.modules()]
    ids = {n: id(p) for n, p in model.named_parameters()}
    fsdp_core.fully_shard(model, units=[model.inner], **options)
    seen = [[(n, tuple(p.shape)) for n, p in model.named_parameters()]]
    with torch.no_grad():
        seen.append([(n, tuple(p.shape)) for n, p in model.named_parameters()])
        model(torch.ones(2, 4))
        seen.append([(n, tuple(p.shape)) for n, p in model.named_parameters()])
    model(torch.ones(2, 4)).sum().backward()
    seen.append([(n, tuple(p.shape)) for n, p in model.named_parameters()])
    assert all(one == expected for one in seen)
    assert {n: id(p) for n, p in model.named_parameters()} == ids
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert [type(module) for module in model.modules()] == classes
    return seen


@every_variant
def test_b06_names_and_shapes_are_the_same_everywhere_always(ranks: Pools, options: dict[str, Any]) -> None:
    first, second = ranks(2).run(_names_and_shapes, options)
    assert first == second


# B07 ----------------------------------------------------------------------------------------------------------------


class OddShapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.transposed = nn.Parameter(torch.randn(5, 4).t())
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.strides: dict[str, tuple[int, ...]] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.strides = {"transposed": self.transposed.stride(), "conv": self.conv.weight.stride()}
        image = x[:, :2, None, None].expand(-1, -1, 3, 3)
        a = (x @ self.transposed * self.scale).to(torch.complex64) * self.phase
        return torch.cat([torch.view_as_real(a).flatten(1), self.conv(image).flatten(1)], 1) + self.empty.sum()


def _odd_shapes(rank: Rank, options: dict[str, Any]) -> None:
    model = OddShapes()
    strides = {"transposed": model.transposed.stride(), "conv": model.conv.weight.stride()}
    pair = Pair(model, **options)
    for step in range(2):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
    assert pair.sharded.strides == strides
    assert is_idle(pair.sharded)


@every_variant
def test_b07_scalars_empty_complex_and_strided_parameters(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_odd_shapes, options)


# B08 ----------------------------------------------------------------------------------------------------------------


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 5)
        self.narrow = nn.Linear(5, 3).bfloat16()
        self.codes = nn.Parameter(torch.arange(6, dtype=torch.uint8).view(2, 3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).bfloat16()).float() * self.codes.float().mean(0)


def _two_dtypes(rank: Rank, options: dict[str, Any]) -> None:
    pair = Pair(TwoDtypes(), lr=0.1, **options)
    for step in range(2):
        pair.plain_gradients(batches := batches_for(rank.world_size, 3, 4, seed=step), mean_square)
        mean_square(pair.sharded, batches[rank.rank]).backward()
        assert pair.sharded.narrow.weight.grad.dtype == torch.bfloat16
        pair.finish_step(rtol=2e-2, atol=2e-2)
    assert torch.equal(whole(pair.sharded.codes), pair.plain.codes)


@every_variant
def test_b08_two_dtypes_and_a_frozen_integer_in_one_unit(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_two_dtypes, options)


# B10 ----------------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, side: int) -> Tensor:
        return (self.left if side == 0 else self.right)(x)


def _other_parameters_per_rank(rank: Rank, options: dict[str, Any]) -> None:
    model = nn.Module()
    pair = Pair(Branches(), **options)
    del model
    batches = list(zip(batches_for(rank.world_size, 3, 4), range(rank.world_size), strict=True))
    for _ in range(2):
        pair.step(rank.rank, batches, lambda m, batch: m(*batch).pow(2).mean())


@every_variant
def test_b10_ranks_that_use_other_parameters_of_a_unit(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_other_parameters_per_rank, options)


# B11 ----------------------------------------------------------------------------------------------------------------


def _other_values(rank: Rank, sync: bool) -> str:
    torch.manual_seed(rank.rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(float(rank.rank))
    torch.manual_seed(0)
    expected = nn.Linear(3, 3).weight.detach()
    if not sync:
        return message_of(lambda: fsdp_core.fully_shard(model), MismatchError)
    fsdp_core.fully_shard(model, sync_module_states=True)
    state = fsdp_core.state_dict(model)
    assert torch.equal(state["0.weight"], expected)
    assert torch.equal(state["1.running_mean"], torch.zeros(3))
    return ""


def test_b11_other_values_raise_or_are_broadcast(ranks: Pools) -> None:
    for message in ranks(2).run(_other_values, False):
        assert "0.weight" in message and "sync_module_states" in message
    ranks(2).run(_other_values, True)


def _other_structure(rank: Rank, kind: str) -> str:
    layers: list[nn.Module] = [nn.Linear(3, 3), nn.Linear(3, 3)]
    if rank.rank == 1 and kind == "layer":
        layers.append(nn.Linear(3, 3))
    if rank.rank == 1 and kind == "dtype":
        layers[1].double()
    return message_of(lambda: fsdp_core.fully_shard(nn.Sequential(*layers)), MismatchError)


@pytest.mark.parametrize("kind", ["layer", "dtype"])
def test_b11_other_structure_raises_on_all_ranks(ranks: Pools, kind: str) -> None:
    for message in ranks(2).run(_other_structure, kind):
        assert "different structure" in message
        assert kind == "layer" or "1.weight" in message


BAD_SETTINGS = {
    "mesh": "dp",
    "process_group": "gloo",
    "sharding_factor": True,
    "units": 0,
    "sync_module_states": None,
    "reshard_after_forward": 2,
    "gather_buffers": "fresh",
    "wire": "tcp",
    "rate_limit": 2,
    "mixed_precision": torch.bfloat16,
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_a_setting_that_is_not_understood_is_refused_by_name(name: str) -> None:
    bad: Any = {name: BAD_SETTINGS[name]}
    with pytest.raises(fsdp_core.errors.WrapError, match=name.split("_")[0].lower()):
        fsdp_core.fully_shard(Tower(), **bad)


def test_one_module_may_be_given_without_a_list() -> None:
    model = Tower()
    fsdp_core.fully_shard(model, units=model.last, ignored_modules=model.inner)
    assert [unit.name for unit in fsdp_core.describe(model).units] == ["<root>", "last"]


def _an_expanded_buffer(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    values = torch.arange(3.0) + rank.rank
    model.register_buffer("wide", values.view(1, 1, 3).expand(2, 4, 3))
    fsdp_core.fully_shard(model, sync_module_states=True)
    assert torch.equal(model.wide, torch.arange(3.0).expand(2, 4, 3)) and model.wide.stride() == (0, 0, 1)


def test_b11_an_expanded_buffer_is_broadcast(ranks: Pools) -> None:
    ranks(2).run(_an_expanded_buffer)


SETTINGS = {
    "reshard_after_forward": (True, False),
    "sharding_factor": (2, 1),
    "mixed_precision": (None, fsdp_core.MixedPrecision(torch.bfloat16)),
    "forward_prefetch": (False, True),
    "rate_limit": (fsdp_core.RateLimit(2), fsdp_core.RateLimit(3)),
    "wire": ("auto", "gloo_p2p"),
    "sync_module_states": (False, True),
}


def _other_settings(rank: Rank, name: str) -> str:
    values = SETTINGS[name]
    return message_of(lambda: fsdp_core.fully_shard(Tower(), **{name: values[rank.rank]}), MismatchError)


@pytest.mark.parametrize("name", SETTINGS)
def test_b11_other_settings_raise_on_all_ranks(ranks: Pools, name: str) -> None:
    for message, value in zip(ranks(2).run(_other_settings, name), SETTINGS[name], strict=True):
        assert f"the same `{name}` on every rank" in message and str(value) in message


def test_parameters_that_share_memory_are_refused_with_both_names() -> None:
    model = Tower()
    model.last.weight = nn.Parameter(model.first.weight.data[:3, :4])
    with pytest.raises(WrapError, match=r"parameter: first\.weight and last\.weight"):
        fsdp_core.fully_shard(model)
    columns = torch.randn(4, 6)
    model = Tower()
    model.first.weight, model.last.weight = nn.Parameter(columns[:, :3].t()), nn.Parameter(columns[:, 3:])
    fsdp_core.fully_shard(model)  # of one storage, but not the same elements


def _copies_are_plain(rank: Rank) -> None:
    model = Tower()
    assert copy.deepcopy(model) is not model


def test_the_helpers_import_on_ranks(ranks: Pools) -> None:
    ranks(2).run(_copies_are_plain)
