"""One suite for every wire: the same results, the same rules about memory, whatever carries the bytes."""

from __future__ import annotations

import pytest
import torch

from fsdp_core.comm.wire import BufferRole, Label
from tests.fsdp_core.wire_support import LABEL, WIRES, ToyTraining, check_sum, poison, sum_in_order, values, wire_on
from tests.support.ranks import Pools, Rank

SIZES = (2, 3, 4)
ON = [pytest.param(name, size, id=f"{name}-{size}") for name in WIRES for size in SIZES] + [
    pytest.param("collectives", 1, id="local-1")
]
NUMELS = (0, 1, 7, 1000, 40_001)  # of one shard; the last is more than one piece of every wire
MOVED = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64,
)  # fmt: skip
SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.complex64)


def _gathers(rank: Rank, name: str) -> None:
    with wire_on(rank, name) as wire:
        for dtype in MOVED:
            for numel in NUMELS if dtype == torch.float32 else (0, 7):
                parts = [values(peer, numel, dtype) for peer in range(rank.world_size)]
                for shard in (wire.empty(numel, dtype, BufferRole.SHARD), torch.empty(numel, dtype=dtype)):
                    shard.copy_(parts[rank.rank])
                    full = wire.empty(numel * rank.world_size, dtype, BufferRole.FULL)
                    poison(full)
                    wire.all_gather(full, shard, LABEL).wait()
                    assert torch.equal(full, torch.cat(parts)), (dtype, numel)
                    wire.quiesce()


@pytest.mark.parametrize(("name", "size"), ON)
def test_all_gather_of_every_dtype_and_odd_sizes(ranks: Pools, name: str, size: int) -> None:
    ranks(size).run(_gathers, name)


def _gathers_in_place(rank: Rank, name: str) -> None:
    with wire_on(rank, name) as wire:
        for role in (BufferRole.FULL, BufferRole.GRAD_FULL):
            full = wire.empty(5 * rank.world_size, torch.float32, role)
            poison(full)
            shard = full[5 * rank.rank : 5 * (rank.rank + 1)]
            shard.copy_(values(rank.rank, 5, torch.float32))
            wire.all_gather(full, shard, LABEL).wait()
            assert torch.equal(full, torch.cat([values(peer, 5, torch.float32) for peer in range(rank.world_size)]))


@pytest.mark.parametrize(("name", "size"), ON)
def test_all_gather_in_place(ranks: Pools, name: str, size: int) -> None:
    ranks(size).run(_gathers_in_place, name)


def _gathers_converted(rank: Rank, name: str) -> None:
    with wire_on(rank, name) as wire:
        whole = torch.cat([values(peer, 301, torch.float32) for peer in range(rank.world_size)])
        for shard in (wire.empty(301, torch.float32, BufferRole.SHARD), torch.empty(301)):
            shard.copy_(values(rank.rank, 301, torch.float32))
            for dtype in (torch.bfloat16, torch.float16, torch.float64):
                full = wire.empty(301 * rank.world_size, dtype, BufferRole.FULL)
                wire.all_gather(full, shard, LABEL).wait()
                assert torch.equal(full, whole.to(dtype))
            wire.quiesce()


@pytest.mark.parametrize(("name", "size"), ON)
def test_all_gather_converts_to_the_dtype_of_the_target(ranks: Pools, name: str, size: int) -> None:
    ranks(size).run(_gathers_converted, name)


def _reduces(rank: Rank, name: str) -> list[bytes]:
    world, bits = rank.world_size, []
    with wire_on(rank, name) as wire:
        for dtype in SUMMED:
            for numel in NUMELS if dtype == torch.float32 else (0, 7, 1000):
                sources = [values(peer, numel * world, dtype) for peer in range(world)]
                expected = sum_in_order(sources)[rank.rank * numel : (rank.rank + 1) * numel]
                for in_place in (False, True):
                    full = wire.empty(numel * world, dtype, BufferRole.GRAD_FULL)
                    if in_place:
                        shard = full[rank.rank * numel : (rank.rank + 1) * numel]
                    else:
                        shard = wire.empty(numel, dtype, BufferRole.GRAD_SHARD)
                        poison(shard)
                    full.copy_(sources[rank.rank])
                    wire.reduce_scatter(shard, full, LABEL).wait()
                    check_sum(name, shard, expected)
                    bits.append(bytes(shard.view(torch.uint8).tolist()) if numel else b"")
                foreign = sources[rank.rank].clone()
                target = torch.empty(numel, dtype=dtype)
                wire.reduce_scatter(target, foreign, LABEL).wait()
                check_sum(name, target, expected)
    return bits


@pytest.mark.parametrize(("name", "size"), ON)
def test_reduce_scatter_of_every_dtype_and_odd_sizes(ranks: Pools, name: str, size: int) -> None:
    ranks(size).run(_reduces, name)


def _averages(rank: Rank, name: str) -> None:
    world, divisor = rank.world_size, 2.5
    with wire_on(rank, name) as wire:
        for dtype in (torch.float32, torch.bfloat16):
            for numel in (1, 1000, 100_001):  # whole to every peer, or in parts; one piece of the cache, or several
                sources = [values(peer, numel * world, dtype) for peer in range(world)]
                summed = sum_in_order(sources)
                full = wire.empty(numel * world, dtype, BufferRole.GRAD_FULL).copy_(sources[rank.rank])
                shard = torch.empty(numel, dtype=dtype)
                wire.reduce_scatter(shard, full, LABEL, divisor).wait()
                check_sum(name, shard, summed[rank.rank * numel : (rank.rank + 1) * numel] / divisor)
                for tensor in (sources[rank.rank].clone(), full.copy_(sources[rank.rank])):
                    work = wire.all_reduce(tensor, LABEL, "sum", divisor)
                    work.wait()
                    work.wait()  # divides once
                    check_sum(name, tensor, summed / divisor)


@pytest.mark.parametrize(("name", "size"), ON)
def test_reductions_divide_once(ranks: Pools, name: str, size: int) -> None:
    ranks(size).run(_averages, name)


def test_sums_have_the_same_bits_on_every_run_and_on_both_cpu_wires(ranks: Pools) -> None:
    first, again = (ranks(3).run(_reduces, "shared_memory") for _ in range(2))
    assert first == again == ranks(3).run(_reduces, "gloo_p2p")


def _all_reduces(rank: Rank, name: str) -> list[bytes]:
    world, bits = rank.world_size, []
    with wire_on(rank, name) as wire:
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
            for numel in (0, 1, 7, 1000, 40_001):
                parts = [values(peer, numel, dtype) for peer in range(world)]
                stacked = torch.stack(parts)
                for op, expected in (
                    ("sum", sum_in_order(parts)),
                    ("max", stacked.amax(0) if numel else parts[0]),
                    ("min", stacked.amin(0) if numel else parts[0]),
                ):
                    for tensor in (torch.empty(numel, dtype=dtype), wire.empty(numel, dtype, BufferRole.GRAD_SHARD)):
                        tensor.copy_(parts[rank.rank])
                        wire.all_reduce(tensor, LABEL, op).wait()
                        check_sum(name, tensor, expected)
                        bits.append(bytes(tensor.view(torch.uint8).tolist()) if numel else b"")
        scalar = torch.tensor(float(rank.rank))
        wire.all_reduce(scalar, LABEL).wait()
        assert scalar.item() == sum(range(world))
    return bits


@pytest.mark.parametrize(("name", "size"), ON)
def test_all_reduce_gives_every_rank_the_same_bits(ranks: Pools, name: str, size: int) -> None:
    bits = ranks(size).run(_all_reduces, name)
    assert all(one == bits[0] for one in bits)


def _broadcasts(rank: Rank, name: str) -> None:
    with wire_on(rank, name) as wire:
        for src in range(rank.world_size):
            for dtype in (torch.float32, torch.bool, torch.int64):
                for numel in (0, 3, 40_001):
                    tensor = values(rank.rank, numel, dtype)
                    wire.broadcast(tensor, src, LABEL).wait()
                    assert torch.equal(tensor, values(src, numel, dtype))


@pytest.mark.parametrize(("name", "size"), ON)
def test_broadcast_from_every_rank(ranks: Pools, name: str, size: int) -> None:
    ranks(size).run(_broadcasts, name)


def _trains(rank: Rank, name: str, use_views: bool, max_pending: int, num_steps: int) -> None:
    with wire_on(rank, name) as wire, torch.no_grad():
        training = ToyTraining(rank, wire, [33, 1, 5000, 260], use_views=use_views, max_pending=max_pending)
        for step in range(num_steps):
            training.step(step)


@pytest.mark.parametrize("pending", [1, 2, 4])
@pytest.mark.parametrize(("name", "size"), ON)
def test_steps_with_poisoned_buffers_and_ranks_that_drift(ranks: Pools, name: str, size: int, pending: int) -> None:
    ranks(size).run(_trains, name, False, pending, 6)


@pytest.mark.parametrize("size", SIZES)
def test_steps_on_views_without_a_copy(ranks: Pools, size: int) -> None:
    ranks(size).run(_trains, "shared_memory", True, 2, 12)


@pytest.mark.full
@pytest.mark.parametrize("use_views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize(("name", "size"), ON)
def test_many_steps_with_ranks_that_drift(ranks: Pools, name: str, size: int, use_views: bool) -> None:
    ranks(size).run(_trains, name, use_views and name == "shared_memory", 2, 300, timeout_s=300)


def _many_in_flight(rank: Rank, name: str) -> None:
    world = rank.world_size
    with wire_on(rank, name) as wire:
        targets, works, expected = [], [], []
        for unit in range(6):
            sources = [values(peer, 100 * world, torch.float32, seed=unit) for peer in range(world)]
            full = wire.empty(100 * world, torch.float32, BufferRole.GRAD_FULL)
            full.copy_(sources[rank.rank])
            target = torch.empty(100)
            works.append(wire.reduce_scatter(target, full, Label(unit, "reduce")))
            targets.append(target)
            expected.append(sum_in_order(sources)[rank.rank * 100 : (rank.rank + 1) * 100])
        for unit in (2, 0, 5, 1, 3, 4):  # the order of waiting is free
            works[unit].wait()
            works[unit].wait()  # and waiting twice does no harm
            assert works[unit].is_completed()
            check_sum(name, targets[unit], expected[unit])


@pytest.mark.parametrize(("name", "size"), ON)
def test_several_reductions_in_flight(ranks: Pools, name: str, size: int) -> None:
    ranks(size).run(_many_in_flight, name)


def _across_inference_mode(rank: Rank, name: str) -> None:
    """Memory asked for, and collectives issued, in inference mode are used outside of it."""
    world = rank.world_size
    with wire_on(rank, name) as wire:
        for numel in (5, 40_000):  # small and large all-reduces differ
            tensor = torch.ones(numel)
            source = torch.ones(numel * world)
            target = torch.empty(numel)
            with torch.inference_mode():
                shard = wire.empty(numel, torch.float32, BufferRole.SHARD)
                full = wire.full_view(shard)
                full = wire.empty(numel * world, torch.float32, BufferRole.FULL) if full is None else full
                works = [wire.all_reduce(tensor, LABEL), wire.reduce_scatter(target, source, LABEL)]
            for work in works:
                work.wait()
            shard.fill_(rank.rank)
            wire.all_gather(full, shard, LABEL).wait()
            assert full[-1] == world - 1
            assert tensor[-1] == target[-1] == world
            wire.quiesce()


@pytest.mark.parametrize("name", ["gloo_p2p", "shared_memory"])
def test_inference_mode_leaves_no_trace(ranks: Pools, name: str) -> None:
    ranks(3).run(_across_inference_mode, name)


def _foreign_memory_is_free_after_wait(rank: Rank, name: str) -> None:
    world = rank.world_size
    with wire_on(rank, name) as wire:
        for turn in range(20):
            source = values(rank.rank, 3 * world, torch.float32, seed=turn)
            shard, full = source[:3].clone(), torch.empty(3 * world)
            wire.all_gather(full, shard, LABEL).wait()
            poison(shard)
            assert torch.equal(full, torch.cat([values(p, 3 * world, torch.float32, turn)[:3] for p in range(world)]))
            target = torch.empty(3)
            wire.reduce_scatter(target, source, LABEL).wait()
            poison(source)
            total = sum_in_order([values(peer, 3 * world, torch.float32, turn) for peer in range(world)])
            check_sum(name, target, total[rank.rank * 3 : (rank.rank + 1) * 3])


@pytest.mark.parametrize(("name", "size"), ON)
def test_memory_from_elsewhere_may_be_written_after_wait(ranks: Pools, name: str, size: int) -> None:
    ranks(size).run(_foreign_memory_is_free_after_wait, name)


def _closes_twice(rank: Rank, name: str) -> None:
    with wire_on(rank, name) as wire:
        shard = wire.empty(4, torch.float32, BufferRole.SHARD).fill_(rank.rank)
        wire.all_gather(torch.empty(4 * rank.world_size), shard, LABEL).wait()
        wire.quiesce()
        wire.close()
        wire.close()
        assert torch.equal(shard, torch.full((4,), float(rank.rank)))  # tensors outlive their wire


@pytest.mark.parametrize(("name", "size"), ON)
def test_close_is_idempotent(ranks: Pools, name: str, size: int) -> None:
    ranks(size).run(_closes_twice, name)


def _counts(rank: Rank, name: str) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    world = rank.world_size
    with wire_on(rank, name, ranks_per_host=2) as wire:
        shard = wire.empty(100, torch.float32, BufferRole.SHARD).zero_()
        wire.all_gather(torch.empty(100 * world, dtype=torch.bfloat16), shard, LABEL).wait()
        wire.reduce_scatter(torch.empty(100), torch.zeros(100 * world), LABEL).wait()
        wire.broadcast(torch.zeros(10), 1, LABEL).wait()
        wire.quiesce()
        counter = wire.counter
        assert sum(counter.num_calls.values()) == 3
        counts = (dict(counter.num_calls), dict(counter.intra_host_bytes), dict(counter.cross_host_bytes))
        counter.reset()
        assert not counter.num_calls
        return counts


@pytest.mark.parametrize("name", WIRES)
def test_bytes_that_leave_a_rank_are_counted(ranks: Pools, name: str) -> None:
    """Four ranks, two hosts of two: one peer is near, two are far."""
    for rank, (calls, intra, cross) in enumerate(ranks(4).run(_counts, name)):
        assert calls["all_gather"] == calls["reduce_scatter"] == 1
        assert (intra["all_gather"], cross["all_gather"]) == (200, 400)
        assert (intra["reduce_scatter"], cross["reduce_scatter"]) == (400, 800)
        sent = intra.get("broadcast", 0) + cross.get("broadcast", 0)
        assert sent > 0 if rank == 1 else sent == 0
