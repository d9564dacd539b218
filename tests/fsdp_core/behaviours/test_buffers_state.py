"""Behaviours of buffers and state: batch norm in low precision, resharding, strictness, copies."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core import MixedPrecision
from fsdp_core.errors import EngineError, StateError
from fsdp_core.handle.sharded_tensor import ShardedTensor
from tests.fsdp_core.behaviours.variants import Tower, every_variant, message_of, two_variants
from tests.support.parity import Pair, batches_for, is_idle, mean_square, whole
from tests.support.ranks import Pools, Rank

# B39 ----------------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("offset", torch.ones(4))
        self.register_buffer("steps", torch.tensor(3))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {"offset": self.offset.dtype, "steps": self.steps.dtype, "x": x.dtype}
        return self.last(self.norm(self.first(x + self.offset)))


def _batch_norm(rank: Rank, options: dict[str, Any]) -> None:
    model = Normed()
    policy = MixedPrecision(torch.bfloat16, torch.float32, buffer_dtype=torch.bfloat16)
    fsdp_core.fully_shard(model, mixed_precision=policy, **options)
    for step in range(2):
        model(batches_for(rank.world_size, 5, 4, seed=step)[rank.rank]).float().pow(2).mean().backward()
        assert model.seen == {"offset": torch.bfloat16, "steps": torch.int64, "x": torch.bfloat16}
        model.zero_grad()
    state = fsdp_core.state_dict(model)
    assert state["norm.running_mean"].dtype == state["norm.running_var"].dtype == torch.float32
    assert state["norm.running_mean"].any() and state["norm.num_batches_tracked"] == 2
    assert state["norm.weight"].dtype == state["first.weight"].dtype == torch.float32
    assert state["steps"].dtype == torch.int64


@every_variant
def test_b39_batch_norm_and_buffers_in_low_precision(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_batch_norm, options)


# B40 ----------------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Six elements in one unit, so that four ranks hold them unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = nn.Linear(2, 2)
        self.tower = Tower()
        self.tower.first = nn.Linear(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(self.tiny(x))


def _build(units: str, factor: int | None, flat: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Small()
    chosen = {"none": None, "inner": [model.tower.inner], "all": [model.tiny, model.tower]}[units]
    fsdp_core.fully_shard(model, units=chosen, sharding_factor=factor)
    parameters = fsdp_core.flat_parameters(model) if flat else model.parameters()
    return model, torch.optim.AdamW(parameters, lr=0.1)


def _save(rank: Rank, units: str, factor: int | None, flat: bool) -> Any:
    model, optimizer = _build(units, factor, flat)
    for step in range(2):
        mean_square(model, batches_for(1, 3, 2, seed=step)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return fsdp_core.state_dict(model), fsdp_core.optim_state_dict(model, optimizer)


def _load(rank: Rank, units: str, factor: int | None, flat: bool, saved: Any) -> None:
    model, optimizer = _build(units, factor, flat)
    state, optim_state = copy.deepcopy(saved)
    fsdp_core.load_state_dict(model, state)
    fsdp_core.load_optim_state_dict(model, optimizer, optim_state)
    again, optim_again = fsdp_core.state_dict(model), fsdp_core.optim_state_dict(model, optimizer)
    for name, value in state.items():
        assert torch.equal(again[name], value), name
    assert set(optim_again["state"]) == set(optim_state["state"])
    for name, values in optim_state["state"].items():
        for key, value in values.items():
            assert torch.equal(optim_again["state"][name][key], value), (name, key)
    mean_square(model, batches_for(1, 3, 2, seed=5)[0]).backward()
    optimizer.step()  # what was loaded can be stepped on


@pytest.mark.parametrize("flat", [False, True], ids=["named", "flat"])
def test_b40_saved_on_four_ranks_loaded_anywhere(ranks: Pools, flat: bool) -> None:
    saved = ranks(4).run(_save, "inner", None, flat)[0]
    for world_size, units, factor, other_flat in [
        (2, "all", None, flat),
        (3, "none", None, not flat),
        (1, "inner", None, flat),
        (4, "all", 2, not flat),
        (2, "inner", 1, flat),
    ]:
        ranks(world_size).run(_load, units, factor, other_flat, saved)


def _sharded_kind(rank: Rank, options: dict[str, Any]) -> None:
    model = Tower()
    pair = Pair(model, units=[model.inner], optimizer=lambda p: torch.optim.AdamW(p, lr=0.1), **options)
    pair.step(rank.rank, batches_for(rank.world_size, 3, 4), mean_square)
    full = fsdp_core.state_dict(model)
    sharded = fsdp_core.state_dict(model, "sharded")
    optim = fsdp_core.optim_state_dict(model, pair.optimizer, "sharded")
    assert list(full) == list(sharded)
    for name, value in sharded.items():
        assert value.shape == full[name].shape
        assert torch.equal(whole(value), full[name])
    saved = {name: value.clone() for name, value in sharded.items()}
    local = fsdp_core.state_dict(model, "local")
    pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=1), mean_square)
    fsdp_core.load_state_dict(model, saved)
    assert all(torch.equal(value, full[name]) for name, value in fsdp_core.state_dict(model).items())
    fsdp_core.load_state_dict(model, {name: value * 0 for name, value in full.items()})
    fsdp_core.load_state_dict(model, local)
    assert all(torch.equal(value, full[name]) for name, value in fsdp_core.state_dict(model).items())
    fsdp_core.load_optim_state_dict(model, pair.optimizer, optim)


@every_variant
def test_b40_sharded_and_local_kinds(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_sharded_kind, options)


# B41 ----------------------------------------------------------------------------------------------------------------


def _strictness(rank: Rank) -> None:
    model = Tower()
    plain = copy.deepcopy(model)
    fsdp_core.fully_shard(model, units=[model.inner])
    state = plain.state_dict()
    state["extra.weight"] = torch.zeros(1)
    del state["inner.0.bias"]
    ours, theirs = fsdp_core.load_state_dict(model, state, strict=False), plain.load_state_dict(state, strict=False)
    assert ours == theirs and repr(ours) == repr(theirs)
    state["last.weight"] = torch.zeros(2, 2)
    messages = [
        message_of(lambda m=m, load=load: load(m, state), RuntimeError)
        for m, load in ((model, fsdp_core.load_state_dict), (plain, nn.Module.load_state_dict))
    ]
    assert messages[0] == messages[1]
    with fsdp_core.full_parameters(model):
        assert list(model.state_dict()) == list(plain.state_dict())


def test_b41_strictness_speaks_as_torch_does(ranks: Pools) -> None:
    ranks(2).run(_strictness)


class SavesMore(nn.Module):
    """A module with a number of its own in its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(2, 3)), 3.0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.tensor(self.scale)

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        self.scale = float(state.pop(prefix + "scale"))
        super()._load_from_state_dict(state, prefix, *more)


class Renamed(nn.Module):
    """A module that reads what was saved under an older name, and writes its version."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.ones(2, 3)), nn.BatchNorm1d(3)
        self.register_load_state_dict_pre_hook(self._rename)
        self.register_state_dict_post_hook(self._stamp)
        self.register_load_state_dict_post_hook(self._forgive)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x @ self.weight)

    @staticmethod
    def _rename(module: nn.Module, state: Any, prefix: str, *more: Any) -> None:
        if prefix + "old" in state:
            state[prefix + "weight"] = state.pop(prefix + "old")

    @staticmethod
    def _stamp(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "stamp"] = torch.tensor(2)

    @staticmethod
    def _forgive(module: nn.Module, keys: Any) -> None:
        keys.unexpected_keys[:] = [key for key in keys.unexpected_keys if not key.endswith("stamp")]


def _own_ways(rank: Rank) -> None:
    model = nn.Sequential(SavesMore(), fsdp_core.FullyShardedDataParallel(Renamed()), nn.BatchNorm1d(2))
    plain = nn.Sequential(SavesMore(), Renamed(), nn.BatchNorm1d(2))
    plain[0].scale = 5.0
    fsdp_core.fully_shard(model)
    saved = plain.state_dict()
    assert list(fsdp_core.state_dict(model)) == list(fsdp_core.state_dict(model, "sharded")) == list(saved)
    assert fsdp_core.state_dict(model)._metadata == saved._metadata  # type: ignore[attr-defined]
    saved["1.old"] = saved.pop("1.weight") * 7
    del saved["2.num_batches_tracked"]  # as before torch counted them
    del saved._metadata
    assert str(fsdp_core.load_state_dict(model, saved)) == str(plain.load_state_dict(saved))
    assert model[0].scale == 5.0
    for name, value in fsdp_core.state_dict(model).items():
        assert torch.equal(value, plain.state_dict()[name]), name
    with fsdp_core.full_parameters(model):
        assert (model[1].weight == 7).all()


def test_b41_modules_that_save_and_load_in_their_own_way(ranks: Pools) -> None:
    ranks(2).run(_own_ways)


def _odd_values(rank: Rank) -> None:
    model = Tower()
    plain = copy.deepcopy(model)
    fsdp_core.fully_shard(model, units=[model.inner])
    for value in (None, 3.0, [[1.0]], torch.zeros(1, 1), torch.zeros(3, 6).numpy()):
        state = {**Tower().state_dict(), "last.weight": value}
        messages = [
            message_of(lambda m=m, load=load, s=state: load(m, s), RuntimeError) for m, load in _both(model, plain)
        ]
        assert messages[0] == messages[1]
    for value in (torch.zeros(3, 6, device="meta"), torch.zeros(3, 6).to_sparse()):
        state = {**Tower().state_dict(), "last.weight": value}
        for m, load in _both(model, plain):
            assert "last.weight" in message_of(lambda m=m, load=load, s=state: load(m, s), RuntimeError)
    before = fsdp_core.state_dict(model)
    wrong = Tower().state_dict()
    if rank.rank == 1:
        wrong["last.weight"] = torch.zeros(1)
    message = message_of(lambda: fsdp_core.load_state_dict(model, wrong), RuntimeError)
    assert ("size mismatch" if rank.rank == 1 else "another rank") in message
    assert all(torch.equal(value, before[name]) for name, value in fsdp_core.state_dict(model).items())
    other = fsdp_core.fully_shard(Tower())
    sharded = fsdp_core.state_dict(other, "sharded")
    assert "another part" in message_of(lambda: fsdp_core.load_state_dict(model, sharded), RuntimeError)


def _both(model: nn.Module, plain: nn.Module) -> tuple[tuple[nn.Module, Any], ...]:
    return (model, fsdp_core.load_state_dict), (plain, nn.Module.load_state_dict)


def test_b41_values_that_are_no_tensors_or_fit_on_one_rank_only(ranks: Pools) -> None:
    ranks(2).run(_odd_values)


# B42 ----------------------------------------------------------------------------------------------------------------


def _state_in_between(rank: Rank, options: dict[str, Any]) -> None:
    model = Tower()
    pair = Pair(model, units=[model.inner], **options)
    for step in range(2):
        one = batches_for(rank.world_size, 3, 4, seed=step)
        two = batches_for(rank.world_size, 3, 4, seed=step + 10)
        pair.plain_gradients(one, mean_square)
        pair.plain_gradients(two, mean_square)
        with fsdp_core.no_sync(model):
            mean_square(model, one[rank.rank]).backward()
            pair.check_parameters()
        loss = mean_square(model, two[rank.rank])
        pair.check_parameters()
        fsdp_core.state_dict(model, "sharded")
        loss.backward()
        pair.check_parameters()
        pair.finish_step()
    assert is_idle(model)


@every_variant
def test_b42_state_dict_in_the_middle_of_a_step(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_state_in_between, options)


# B43 ----------------------------------------------------------------------------------------------------------------


def _copies(rank: Rank, options: dict[str, Any]) -> str:
    model = Tower()
    pair = Pair(model, units=[model.inner], **options)
    pair.step(rank.rank, batches_for(rank.world_size, 3, 4), mean_square)
    other = Pair(nn.Linear(1, 1))
    other.sharded, other.plain = copy.deepcopy(pair.sharded), copy.deepcopy(pair.plain)
    other.optimizer = torch.optim.SGD(other.sharded.parameters(), lr=0.1)
    other.plain_optimizer = torch.optim.SGD(other.plain.parameters(), lr=0.1)
    assert [n for n, _ in other.sharded.named_parameters()] == [n for n, _ in pair.sharded.named_parameters()]
    for step in range(2):
        other.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step + 5), mean_square)
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
    assert is_idle(pair.sharded) and is_idle(other.sharded)
    average = torch.optim.swa_utils.AveragedModel(pair.sharded)
    average.update_parameters(pair.sharded)
    average.update_parameters(pair.sharded)
    return message_of(lambda: pickle.dumps(pair.sharded), EngineError)


@every_variant
def test_b43_deepcopy_trains_on_its_own_and_pickling_refuses(ranks: Pools, options: dict[str, Any]) -> None:
    for message in ranks(2).run(_copies, options):
        assert "state_dict" in message


@two_variants
def test_wrapper_front_end(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_wrapper, options)


def _wrapper(rank: Rank, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Tower()
    plain = copy.deepcopy(model)
    model.inner = fsdp_core.FullyShardedDataParallel(model.inner, **options)
    wrapped = fsdp_core.FullyShardedDataParallel(model, limit_all_gathers=True, **options)
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    pair = Pair(nn.Linear(1, 1))
    pair.plain, pair.sharded = plain, wrapped
    pair.plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    pair.optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    for step in range(2):
        batches = batches_for(rank.world_size, 3, 4, seed=step)
        with wrapped.no_sync():
            mean_square(wrapped, batches[rank.rank]).backward()
        pair.plain_gradients(batches, mean_square)
        pair.step(rank.rank, batches, mean_square)
    wrapped.load_state_dict(plain.state_dict())
    assert wrapped.first is model.first and wrapped.clip_grad_norm_(1.0) == 0
    message = message_of(
        lambda: fsdp_core.FullyShardedDataParallel(Tower(), sharding_strategy="FULL_SHARD"), fsdp_core.errors.WrapError
    )
    assert "sharding_factor" in message


def test_local_kind_of_another_layout_is_refused() -> None:
    model = fsdp_core.fully_shard(Tower())
    state = fsdp_core.state_dict(model, "local")
    other = fsdp_core.fully_shard(tower := Tower(), units=[tower.inner])
    with pytest.raises(StateError, match="another layout"):
        fsdp_core.load_state_dict(other, state)


def test_a_plain_model_around_a_wrapper_saves_all_of_it() -> None:
    plain = Tower()
    model = copy.deepcopy(plain)
    model.inner = fsdp_core.FullyShardedDataParallel(model.inner)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_torchs_mixed_precision_is_refused_at_once() -> None:
    from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision

    with pytest.raises(fsdp_core.errors.WrapError, match=r"fsdp_core\.MixedPrecision"):
        fsdp_core.fully_shard(Tower(), mixed_precision=TorchMixedPrecision(torch.bfloat16))  # type: ignore[arg-type]


def _units_of(**options: Any) -> list[str]:
    model = fsdp_core.FullyShardedDataParallel(Tower(), **options)
    mean_square(model, torch.ones(2, 4)).backward()
    return [unit.name for unit in fsdp_core.describe(model).units]


def test_torchs_keywords_and_values_on_the_wrapper() -> None:
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload
    from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

    assert _units_of(sharding_strategy=None, param_init_fn=None, use_orig_params=True, ignored_states=None) == [
        "<root>"
    ]
    for offload in (None, CPUOffload(True), CPUOffload(False), True):
        assert _units_of(cpu_offload=offload) == ["<root>"]
    for prefetch in (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, False):
        assert _units_of(backward_prefetch=prefetch) == ["<root>"]
    linear = ["<root>", "first", "inner.0", "inner.2", "last"]
    small = functools.partial(size_based_auto_wrap_policy, min_num_params=20)
    for policy in (ModuleWrapPolicy({nn.Linear}), CustomPolicy(lambda module: isinstance(module, nn.Linear)), small):
        assert _units_of(auto_wrap_policy=policy) == linear
    model = Tower()
    wrapped = fsdp_core.FullyShardedDataParallel(model, ignored_states=[model.inner])
    assert isinstance(wrapped.last.weight, ShardedTensor) and not isinstance(model.inner[0].weight, ShardedTensor)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"param_init_fn": nn.Module.eval}, "deferred_init"),
        ({"ignored_states": [nn.Parameter(torch.ones(1))]}, "modules"),
        ({"auto_wrap_policy": lambda module, recurse, nonwrapped_numel: True}, "predicate"),
        ({"backward_prefetch": "early"}, "backward_prefetch"),
        ({"cpu_offload": "yes"}, "cpu_offload"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_torchs_keywords_that_have_no_counterpart_say_what_to_use(options: Any, advice: str) -> None:
    with pytest.raises(fsdp_core.errors.WrapError, match=advice):
        fsdp_core.FullyShardedDataParallel(Tower(), **options)
