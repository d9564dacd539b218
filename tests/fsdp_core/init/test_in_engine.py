"""``fully_shard`` of a deferred model: the same bits as every other way, on any number of ranks, unit by unit."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_core
from fsdp_core import deferred_init, fully_shard, seeded_init
from fsdp_core.errors import InitError, MismatchError
from fsdp_core.init import is_deferred
from fsdp_core.init.recorder import live_recorder
from tests.support.parity import batches_for, mean_square
from tests.support.ranks import Pools, Rank, RanksFailed

SEED = 9


class Block(nn.Module):
    def __init__(self, width: int, before: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        nn.init.trunc_normal_(self.down.weight, std=0.2)
        self.scale = nn.Parameter(torch.ones(width) if before is None else before.up.weight.norm(dim=0))
        self.register_buffer("offset", torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale + self.offset


class Net(nn.Module):
    """Each block's scale is a norm of the block before; embedding and head are tied over units; a plain attribute."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(3, width, bias=False)
        blocks: list[Block] = []
        for _ in range(3):
            blocks.append(Block(width, blocks[-1] if blocks else None))
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(3, width, bias=False)
        self.last.weight = self.first.weight
        self.first.weight._no_weight_decay = True
        self.table = [torch.linspace(0, 1, width)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.table[0]
        for block in self.blocks:
            x = block(x)
        return x @ self.last.weight


def built(way: str) -> nn.Module:
    with seeded_init(SEED):
        return deferred_init(Net) if way == "deferred" else Net()


def sharded_bits(rank: Rank, way: str, options: dict[str, Any]) -> dict[str, list[float]]:
    """Full state after sharding and after one step of training; the model as it is in between."""
    model = built(way)
    weight = model.first.weight
    fully_shard(model, units=[Block], **options)
    assert not is_deferred(model)
    assert not is_deferred(model.table[0])
    assert model.first.weight is weight  # the object an optimizer or a user may already hold
    assert model.last.weight is weight
    assert weight._no_weight_decay
    before = fsdp_core.state_dict(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean_square(model, batches_for(1, 4, 3)[0]).backward()
    optimizer.step()
    after = fsdp_core.state_dict(model)
    return {f"{when}.{n}": t.tolist() for when, s in (("0", before), ("1", after)) for n, t in s.items()}


def expected_bits() -> dict[str, list[float]]:
    return {f"0.{name}": value.tolist() for name, value in built("eager").state_dict().items()}


@pytest.mark.parametrize("way", ["deferred", "streamed"])
@pytest.mark.parametrize(("world_size", "factor"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_same_bits_for_every_way_and_factor(ranks: Pools, world_size: int, factor: int, way: str) -> None:
    first, *others = ranks(world_size).run(sharded_bits, way, {"sharding_factor": factor})
    assert all(other == first for other in others)
    assert {name: value for name, value in first.items() if name.startswith("0.")} == expected_bits()


@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}, {"sync_module_states": True}], ids=str)
def test_one_rank(options: dict[str, Any]) -> None:
    bits = sharded_bits(Rank(0, 1, None), "deferred", options)  # type: ignore[arg-type]
    assert {name: value for name, value in bits.items() if name.startswith("0.")} == expected_bits()


def test_module_by_module() -> None:
    model = built("deferred")
    for block in reversed(model.blocks):
        fully_shard(block)
    fully_shard(model)
    state = fsdp_core.state_dict(model)
    assert {f"0.{name}": value.tolist() for name, value in state.items()} == expected_bits()


def shard_with_own_seed(rank: Rank, sync_module_states: bool) -> dict[str, list[float]]:
    with seeded_init(rank.rank):
        model = deferred_init(Net)
    fully_shard(model, units=[Block], sync_module_states=sync_module_states)
    return {name: value.tolist() for name, value in fsdp_core.state_dict(model).items()}


def test_other_seeds_on_other_ranks_are_an_error(ranks: Pools) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(shard_with_own_seed, False)
    for outcome in caught.value.outcomes:
        assert isinstance(outcome.error, MismatchError)
        assert "seeded_init" in str(outcome.error)


def test_or_the_first_ranks_values_win(ranks: Pools) -> None:
    first, second = ranks(2).run(shard_with_own_seed, True)
    assert first == second
    with seeded_init(0):
        assert first == {name: value.tolist() for name, value in Net().state_dict().items()}


def test_errors_carry_the_full_name() -> None:
    model = built("deferred")
    recording = model.blocks[1].up.bias.recorder.recording
    node = recording.nodes[model.blocks[1].up.bias.slot.writers[-1]]
    object.__setattr__(node, "args", (*node.args[:1], 2.0, 1.0))
    with pytest.raises(InitError, match=r"parameter: blocks\.1\.up\.bias"):
        fully_shard(model, units=[Block])


def test_the_recording_goes_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_core.init.recorder._live", None)  # earlier tests' models may not be collected yet
    model = built("deferred")
    recorder = weakref.ref(live_recorder())
    assert recorder() is model.first.weight.recorder
    fully_shard(model, units=[Block])
    assert recorder() is None


class PeakBytes(TorchDispatchMode):
    """Peak of real CPU memory that somebody holds, of storages seen in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[int, StorageWeakRef]] = {}
        self.peak = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and result.device.type == "cpu" and not is_deferred(result):
            try:
                storage = result.untyped_storage()
            except (InitError, NotImplementedError, RuntimeError):
                return result
            self.seen[storage._cdata] = (storage.nbytes(), StorageWeakRef(storage))
        self.seen = {key: value for key, value in self.seen.items() if not value[1].expired()}
        self.peak = max(self.peak, sum(size for size, _ in self.seen.values()))
        return result


def test_peak_memory_is_the_shards_and_one_tensor() -> None:
    width, depth = 64, 8
    layer_bytes = width * width * 4

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))

    with PeakBytes() as peak:
        model = deferred_init(build)
        fully_shard(model, units=[nn.Linear])
    assert depth * layer_bytes <= peak.peak <= (depth + 1.2) * layer_bytes  # F = 1: the shards are the model
