"""Which ranks, which modules, how many bytes: subgroups, meshes, units of non-neighbours, and the law of traffic."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_core
from fsdp_core.layout.unit_policy import regroup_by_order
from tests.fsdp_core.behaviours.variants import every_variant
from tests.fsdp_core.engine.test_parity import Block, Net
from tests.support.parity import Pair, batches_for, is_idle, mean_square
from tests.support.ranks import Pools, Rank

# groups ---------------------------------------------------------------------------------------------------------------


def _on_a_subgroup(rank: Rank, factor: int | None, use_mesh: bool) -> Any:
    """Ranks 1 to 3 (or 2 and 3) train; rank 0 knows nothing of it."""
    members = [2, 3] if factor is not None else [1, 2, 3]
    if rank.rank not in members:
        return None
    group = dist.new_group(members, use_local_synchronization=True)
    pair = Pair(Net(), units=[Block], sharding_factor=factor, process_group=group)
    batches = batches_for(len(members), 4, 3)
    for _ in range(2):
        pair.step(members.index(rank.rank), batches, mean_square)
    report = fsdp_core.describe(pair.sharded).groups[0]
    return report.shard_groups, report.replicate_groups


def test_a_subgroup_without_rank_zero(ranks: Pools) -> None:
    assert ranks(4).run(_on_a_subgroup, None, False)[1:] == [(((1, 2, 3),), ((1,), (2,), (3,)))] * 3
    assert ranks(4).run(_on_a_subgroup, 1, False)[2:] == [(((2,), (3,)), ((2, 3),))] * 2


def _on_a_mesh(rank: Rank) -> Any:
    """The engine takes the last axis, or the last two, of a larger mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    pair = Pair(Net(), units=[Block], mesh=mesh)
    pair.step(rank.rank, batches_for(4, 4, 3), mean_square)
    report = fsdp_core.describe(pair.sharded).groups[0]
    assert report.shard_groups == ((0, 1), (2, 3)) and report.replicate_groups == ((0, 2), (1, 3))
    row = Pair(Net(), units=[Block], mesh=mesh["shard"])
    mine = fsdp_core.describe(row.sharded).groups[0].shard_groups
    row.step(rank.rank % 2, batches_for(2, 4, 3), mean_square)
    return mine


def test_axes_of_a_mesh(ranks: Pools) -> None:
    first, second = (((0, 1),),), (((2, 3),),)
    assert ranks(4).run(_on_a_mesh) == [*first, *first, *second, *second]


# units ----------------------------------------------------------------------------------------------------------------


class Ladder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = torch.tanh(step(x))
        return x


def _group_units(rank: Rank, options: dict[str, Any]) -> list[str]:
    """The paper's Fig. 1: [[0, 3], [1, 2], [4]] and the root holds 5."""
    model = Ladder()
    s = model.steps
    pair = Pair(model, units=[(s[0], s[3]), (s[1], s[2]), s[4]], **options)
    for step in range(3):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
    assert is_idle(pair.sharded)
    return [unit.name for unit in fsdp_core.describe(model).units]


@every_variant
def test_units_of_modules_that_are_not_neighbours(ranks: Pools, options: dict[str, Any]) -> None:
    names = ["<root>", "steps.0+steps.3", "steps.1+steps.2", "steps.4"]
    assert ranks(2).run(_group_units, options) == [names, names]


def _size_and_order(rank: Rank) -> list[list[str]]:
    model = Ladder()
    plain = copy.deepcopy(model)
    first = copy.deepcopy(model)
    fsdp_core.fully_shard(first, units=[nn.Linear])
    first(torch.ones(2, 4))
    order = [(model.steps[int(name.split(".")[1])], numel) for name, numel in fsdp_core.observed_order(first)]
    pair = Pair(plain, units=None)
    pair.sharded = fsdp_core.fully_shard(model, units=regroup_by_order(order, 40))
    pair.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    pair.step(rank.rank, batches_for(rank.world_size, 3, 4), mean_square)
    sized = fsdp_core.fully_shard(Net(), units=60)
    return [[unit.name for unit in fsdp_core.describe(m).units] for m in (model, sized)]


def test_units_regrouped_by_observed_order_and_by_size(ranks: Pools) -> None:
    expected = [
        ["<root>", "steps.0+steps.1", "steps.2+steps.3", "steps.4+steps.5"],
        ["<root>", "blocks.0.up", "blocks.1.up", "blocks.2.up"],
    ]
    regrouped, sized = ranks(2).run(_size_and_order)[0]
    assert regrouped == expected[0]
    assert sized[0] == "<root>" and len(sized) > 3


def _ignored(rank: Rank) -> None:
    model = Net()
    pair = Pair(model, units=[Block], ignored_modules=[model.last])
    assert type(model.last.weight) is nn.Parameter
    batches = [batches_for(1, 4, 3)[0]] * rank.world_size  # equal batches: ignored gradients are not reduced
    pair.step(rank.rank, batches, mean_square)
    pair.plain_gradients(batches, mean_square)
    mean_square(pair.sharded, batches[0]).backward()
    torch.testing.assert_close(
        fsdp_core.clip_grad_norm_(model, 0.1), torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1)
    )
    pair.finish_step()


def test_ignored_modules_are_left_alone(ranks: Pools) -> None:
    ranks(2).run(_ignored)


# traffic --------------------------------------------------------------------------------------------------------------


def _traffic(rank: Rank, factor: int, raf: bool, wire: str, low: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes sent in one step, and what the law says."""
    policy = fsdp_core.MixedPrecision(torch.bfloat16, torch.float32) if low else None
    model = Net(width=7)
    fsdp_core.fully_shard(
        model,
        units=[Block],
        sharding_factor=factor,
        reshard_after_forward=raf,
        wire=wire,
        mixed_precision=policy,
        ranks_per_host=2,
    )
    batch = batches_for(rank.world_size, 3, 3)[rank.rank]
    mean_square(model, batch).backward()
    before = fsdp_core.bytes_sent(model)
    mean_square(model, batch).backward()
    after = fsdp_core.bytes_sent(model)
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    counted = {
        kind: after[kind].nbytes - (before[kind].nbytes if kind in before else 0) if kind in after else 0
        for kind in kinds
    }
    units = fsdp_core.describe(model).units
    shard = {unit.name: sum(flat.shard_numel for flat in unit.flat_parameters) for unit in units}
    everything, replicas = sum(shard.values()), rank.world_size // factor
    is_read_in_place = wire == "shared_memory" and factor > 1  # nothing to free, nothing to gather again
    again = sum(shard[f"blocks.{i}"] for i in range(2)) if raf and not is_read_in_place else 0  # not root, last unit
    itemsize = 2 if low else 4
    copies_sent = 2 * (replicas - 1) / replicas if wire == "collectives" else replicas - 1  # small ones go whole
    law = {
        "all_gather": (factor - 1) * (everything + again) * itemsize,
        "reduce_scatter": (factor - 1) * everything * 4,
        "all_reduce": sum(round(copies_sent * numel * 4) for numel in shard.values()),
    }
    return counted, law


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("raf", [True, False], ids=["raf", "nraf"])
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_bytes_sent_follow_the_law(ranks: Pools, factor: int, raf: bool, low: bool) -> None:
    for counted, law in ranks(4).run(_traffic, factor, raf, "collectives", low):
        assert counted == law


@pytest.mark.parametrize("raf", [True, False], ids=["raf", "nraf"])
@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("wire", ["gloo_p2p", "shared_memory"])
def test_bytes_sent_follow_the_law_on_the_cpu_wires(ranks: Pools, wire: str, factor: int, raf: bool) -> None:
    for counted, law in ranks(4).run(_traffic, factor, raf, wire, factor == 2):
        assert counted == law


def _by_host(rank: Rank) -> tuple[int, int]:
    """Hybrid, one copy per host: bytes within and across hosts."""
    model = fsdp_core.fully_shard(Net(), sharding_factor=2, wire="gloo_p2p", ranks_per_host=2)
    mean_square(model, batches_for(4, 3, 3)[rank.rank]).backward()
    sent = fsdp_core.bytes_sent(model)
    assert sent["all_reduce"].num_calls >= 1
    return sent["all_gather"].cross_host_bytes, sent["all_reduce"].cross_host_bytes


def test_hybrid_gathers_stay_inside_a_host(ranks: Pools) -> None:
    for gathered, reduced in ranks(4).run(_by_host):
        assert gathered == 0 < reduced


# checkpoints ----------------------------------------------------------------------------------------------------------


def _save_with_dcp(rank: Rank, path: str) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp

    model = fsdp_core.fully_shard(Net(), units=[Block])
    dcp.save(fsdp_core.state_dict(model, "sharded"), checkpoint_id=path)
    return fsdp_core.state_dict(model)


def _load_with_dcp(rank: Rank, path: str, factor: int | None, expected: dict[str, Tensor]) -> None:
    import torch.distributed.checkpoint as dcp

    model = fsdp_core.fully_shard(Net(), units=60, sharding_factor=factor)
    state = fsdp_core.state_dict(model, "sharded")
    for value in state.values():
        value.zero_()
    dcp.load(state, checkpoint_id=path)
    fsdp_core.load_state_dict(model, state)
    for name, value in fsdp_core.state_dict(model).items():
        assert torch.equal(value, expected[name]), name


def test_sharded_state_goes_through_torch_distributed_checkpoint(ranks: Pools, tmp_path: Any) -> None:
    expected = ranks(4).run(_save_with_dcp, str(tmp_path))[0]
    ranks(2).run(_load_with_dcp, str(tmp_path), None, expected)
    ranks(4).run(_load_with_dcp, str(tmp_path), 2, expected)
