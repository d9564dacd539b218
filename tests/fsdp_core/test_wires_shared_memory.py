"""What only the shared-memory wire does: views without a copy, free gathers, fallback, subgroups, memory kept small."""

from __future__ import annotations

import gc
import os
import resource
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fsdp_core.comm import shm_memory
from fsdp_core.comm.rendezvous import StoreRendezvous
from fsdp_core.comm.select import choose_wire
from fsdp_core.comm.shared_memory import SharedMemoryWire
from fsdp_core.comm.wire import BufferRole, Label
from fsdp_core.errors import WireError
from tests.fsdp_core.wire_support import CPU, LABEL, values, wire_on
from tests.support.ranks import Pools, Rank


def _uses_views(rank: Rank) -> None:
    world, numel = rank.world_size, 3001  # slices end inside a page
    with wire_on(rank, "shared_memory") as wire:
        shard = wire.empty(numel, torch.float32, BufferRole.SHARD)
        shard.copy_(values(rank.rank, numel, torch.float32))
        view = wire.full_view(shard)
        assert view is not None
        assert wire.full_view(shard) is view
        whole = torch.cat([values(peer, numel, torch.float32) for peer in range(world)])
        wire.all_gather(view, shard, LABEL).wait()
        assert torch.equal(view, whole)

        view.mul_(rank.rank + 2)  # every rank writes something else: nobody sees the others' writes
        wire.all_reduce(torch.zeros(1), LABEL).wait()
        assert torch.equal(view, whole * (rank.rank + 2))
        mine = whole[rank.rank * numel : (rank.rank + 1) * numel]
        assert torch.equal(shard, mine), "a write to the view does not reach the shard"
        wire.all_gather(view, shard, LABEL).wait()
        assert torch.equal(view, whole), "the next gather restores the view"

        wire.quiesce()
        shard.add_(1)
        wire.all_gather(view, shard, LABEL).wait()
        assert torch.equal(view, whole + 1), "a view follows the shards"
        wire.quiesce()
        assert wire.full_view(torch.zeros(numel)) is None, "memory from elsewhere has no view"
        assert wire.full_view(shard[1:]) is None


@pytest.mark.parametrize("size", [2, 3])
def test_a_view_is_private_and_restored_by_the_next_gather(ranks: Pools, size: int) -> None:
    ranks(size).run(_uses_views)


def _uses_converted_views(rank: Rank) -> None:
    world, numel = rank.world_size, 501
    with wire_on(rank, "shared_memory") as wire:
        shard = wire.empty(numel, torch.float32, BufferRole.SHARD)
        shard.copy_(values(rank.rank, numel, torch.float32))
        whole = torch.cat([values(peer, numel, torch.float32) for peer in range(world)])
        full = torch.empty(numel * world)
        wire.all_gather(full, shard, LABEL).wait()  # the shards are open for reading already
        low = wire.full_view(shard, torch.bfloat16)
        assert low is not None
        assert low.dtype == torch.bfloat16
        for step in range(5):
            for phase in ("forward", "backward"):
                wire.all_gather(low, shard, Label(0, phase)).wait()
                assert torch.equal(low, whole.bfloat16()), (step, phase)
                low.fill_(float("nan"))
                wire.all_gather(full, shard, Label(0, phase)).wait()
                assert torch.equal(full, whole)
            wire.quiesce()
            whole.add_(0.37)
            shard.add_(0.37)


@pytest.mark.parametrize("size", [2, 3])
def test_a_converted_view_follows_its_shards(ranks: Pools, size: int) -> None:
    ranks(size).run(_uses_converted_views)


def test_a_rank_may_run_ahead_inside_a_step(ranks: Pools) -> None:
    """1500 gathers are more than the board remembers: the leading rank waits, nothing is lost, no deadlock."""
    ranks(2).run(_runs_far_ahead)


def _runs_far_ahead(rank: Rank) -> None:
    with wire_on(rank, "shared_memory") as wire:
        shard = wire.empty(5, torch.float32, BufferRole.SHARD).fill_(rank.rank)
        full = torch.empty(5 * rank.world_size)
        for turn in range(1500):
            wire.all_gather(full, shard, Label(turn, "forward")).wait()
        wire.quiesce()


def test_gathers_inside_a_step_wait_for_nobody(ranks: Pools) -> None:
    ranks(2).run(_gathers_without_asking)


def _gathers_without_asking(rank: Rank) -> None:
    with wire_on(rank, "shared_memory") as wire:
        shard = wire.empty(5, torch.float32, BufferRole.SHARD).fill_(rank.rank)
        full = torch.empty(5 * rank.world_size)
        wire.all_gather(full, shard, LABEL).wait()
        dist.barrier()
        for leader in range(rank.world_size):
            if rank.rank == leader:
                for _ in range(100):
                    wire.all_gather(full, shard, LABEL).wait()
                    assert full[-1] == rank.world_size - 1
            dist.barrier()  # would never be reached if a gather waited for the other rank
        wire.quiesce()


def _no_space_on_one_rank(rank: Rank) -> tuple[str, str]:
    group = dist.new_group(list(range(rank.world_size)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        selection = choose_wire("auto", group=group, ranks=range(rank.world_size), device=CPU, expected_bytes=1 << 62)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    tensor = torch.ones(3)
    selection.wire.all_reduce(tensor, LABEL).wait()
    assert tensor.tolist() == [float(rank.world_size)] * 3
    selection.wire.close()
    return selection.wire.name, selection.message


def test_without_space_all_ranks_fall_back_and_say_why(ranks: Pools) -> None:
    for name, message in ranks(2).run(_no_space_on_one_rank):
        assert name == "gloo_p2p"
        assert "not enough memory" in message
        assert "bytes" in message


def _runs_out_later(rank: Rank) -> str:
    """A rank whose reserve fails in ``empty`` says so at once; its peers hear it in their next wait."""
    with wire_on(rank, "shared_memory", own_group=True) as wire:
        wire.all_reduce(torch.zeros(3), LABEL).wait()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            if rank.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
                wire.empty(1 << 20, torch.float32, BufferRole.GRAD_FULL)
            wire.all_reduce(torch.zeros(3), LABEL).wait()
        except WireError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    raise AssertionError("no error")


def test_running_out_of_space_is_an_error_on_all_ranks_not_a_signal(ranks: Pools) -> None:
    peer, culprit = ranks(2).run(_runs_out_later)
    assert "not enough shared memory" in culprit
    assert "4194304 bytes" in culprit
    assert "rank 1 gave up" in peer
    assert "not enough shared memory" in peer


def _subgroup(rank: Rank) -> None:
    """Ranks 1 and 3 of four, found through a store, without a process group."""
    members = (1, 3)
    if rank.rank not in members:
        return
    rendezvous = StoreRendezvous(rank.store, members, rank.rank, "test_subgroup", timedelta(seconds=20))
    wire = SharedMemoryWire(rendezvous, timeout=timedelta(seconds=20))
    me = members.index(rank.rank)
    shard = wire.empty(5, torch.float32, BufferRole.SHARD).fill_(rank.rank)
    full = torch.empty(10)
    wire.all_gather(full, shard, LABEL).wait()
    assert full.tolist() == [1.0] * 5 + [3.0] * 5
    wire.broadcast(full, 1, LABEL).wait()
    target = torch.empty(5)
    wire.reduce_scatter(target, full, LABEL).wait()
    assert target.tolist() == [[2.0] * 5, [6.0] * 5][me]
    wire.quiesce()
    wire.close()


def test_a_subgroup_without_rank_zero(ranks: Pools) -> None:
    ranks(4).run(_subgroup)


def _two_hosts(rank: Rank) -> str:
    from fsdp_core.comm import shared_memory

    real = shared_memory._host_identity
    shared_memory._host_identity = lambda: f"host{rank.rank} boot pid"  # type: ignore[assignment]
    try:
        group = dist.new_group(list(range(rank.world_size)))
        selection = choose_wire("auto", group=group, ranks=range(rank.world_size), device=CPU)
    finally:
        shared_memory._host_identity = real
    selection.wire.close()
    return f"{selection.wire.name} {selection.message}"


def test_ranks_on_two_hosts_talk_through_gloo(ranks: Pools) -> None:
    for told in ranks(2).run(_two_hosts):
        assert told.startswith("gloo_p2p")
        assert "rank 0 on host0" in told
        assert "rank 1 on host1" in told


def _memory_goes_back(rank: Rank) -> None:
    def shared_pages() -> int:
        return sum(os.fstat(file.fd).st_blocks * 512 for file in (wire._home.file, wire._shards._file))

    with wire_on(rank, "shared_memory") as wire:
        assert isinstance(wire, SharedMemoryWire)
        big = shm_memory.SPARE_BYTES // 2
        start = shared_pages()
        for _ in range(6):
            buffer = wire.empty(big, torch.uint8, BufferRole.GRAD_FULL)
            shard = wire.empty(1 << 20, torch.uint8, BufferRole.SHARD)
            full = torch.empty(rank.world_size << 20, dtype=torch.uint8)
            wire.all_gather(full, shard.fill_(1), LABEL).wait()
            target = torch.empty(big // rank.world_size, dtype=torch.uint8)
            wire.reduce_scatter(target, buffer.zero_(), LABEL).wait()
            wire.quiesce()
            del buffer, shard
            gc.collect()
        dist.barrier()
        wire._home._collect()
        assert shared_pages() - start <= shm_memory.SPARE_BYTES + (1 << 20)


def test_dropped_tensors_give_their_pages_back(ranks: Pools) -> None:
    ranks(2).run(_memory_goes_back)


def _choices(rank: Rank) -> dict[str, str]:
    ranks_ = list(range(rank.world_size))
    names = {}
    for choice in ("auto", "collectives", "gloo_p2p", "shared_memory"):
        group = dist.new_group(ranks_)
        selection = choose_wire(choice, group=group, ranks=ranks_, device=CPU)
        names[choice] = selection.wire.name
        assert selection.message == ""
        selection.wire.close()
    return names


def test_auto_takes_shared_memory_inside_a_host(ranks: Pools) -> None:
    for names in ranks(2).run(_choices):
        assert names == {
            "auto": "shared_memory",
            "collectives": "collectives",
            "gloo_p2p": "gloo_p2p",
            "shared_memory": "shared_memory",
        }


def _cpu_wire_on_cuda(rank: Rank) -> str:
    group = dist.new_group(list(range(rank.world_size)))
    with pytest.raises(WireError) as caught:
        choose_wire("shared_memory", group=group, ranks=range(rank.world_size), device=torch.device("cuda", 0))
    return str(caught.value)


def test_a_cpu_wire_on_another_device_is_refused(ranks: Pools) -> None:
    for text in ranks(2).run(_cpu_wire_on_cuda):
        assert "device cuda" in text
        assert "wire='auto'" in text


def _open_files(rank: Rank) -> tuple[int, int, int]:
    """Before, with ten wires, after they are closed."""

    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    members = tuple(range(rank.world_size))
    with wire_on(rank, "shared_memory", own_group=True):
        before = count()
        wires, kept = [], []
        for number in range(10):
            rendezvous = StoreRendezvous(rank.store, members, rank.rank, f"test_files_{number}", timedelta(seconds=20))
            wires.append(SharedMemoryWire(rendezvous, timeout=timedelta(seconds=20)))
            wires[-1].all_reduce(torch.zeros(3), LABEL).wait()
            for role in (BufferRole.SHARD, BufferRole.GRAD_FULL, BufferRole.GRAD_SHARD):
                kept.append(wires[-1].empty(100, torch.float32, role))
        during = count()
        for wire in wires:
            wire.close()
        del wire
        wires.clear()  # the tensors stay
        return before, during, count()


def test_a_wire_holds_few_files_open_and_closes_them(ranks: Pools) -> None:
    """A model wrapped module by module has a wire per unit: own home, the peer's home, the shards, the board."""
    for before, during, after in ranks(2).run(_open_files):
        assert during - before <= 10 * 4
        assert after <= before
