"""Ranks that disagree, leave, die or never come: an error on every rank that names them, never a hang."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from fsdp_core.comm.wire import BufferRole, Label, Wire
from fsdp_core.errors import EngineError, MismatchError, WireError
from tests.fsdp_core.wire_support import LABEL, wire_on
from tests.support.ranks import Pools, Rank, RankPool

LABELLED = ("gloo_p2p", "shared_memory")


@contextlib.contextmanager
def _error_text(kind: type[EngineError], told: list[str]) -> Iterator[None]:
    try:
        yield
    except kind as error:
        told.append(str(error))
    else:
        raise AssertionError(f"expected {kind.__name__}")


def _collective(wire: Wire, kind: str, label: Label, numel: int = 6) -> None:
    world = wire.group_size
    if kind == "all_gather":
        shard = wire.empty(numel, torch.float32, BufferRole.SHARD).zero_()
        wire.all_gather(torch.empty(numel * world), shard, label).wait()
    elif kind == "foreign_all_gather":
        wire.all_gather(torch.empty(numel * world), torch.zeros(numel), label).wait()
    elif kind == "reduce_scatter":
        full = wire.empty(numel * world, torch.float32, BufferRole.GRAD_FULL).zero_()
        wire.reduce_scatter(torch.empty(numel), full, label).wait()
    elif kind == "all_reduce":
        wire.all_reduce(torch.zeros(numel), label).wait()
    elif kind == "broadcast":
        wire.broadcast(torch.zeros(numel), 0, label).wait()
    wire.quiesce()  # wires without waiting gathers tell here at the latest


def _disagree(rank: Rank, name: str, kinds: list[str], numels: list[int], units: list[int]) -> list[str]:
    """Rank r calls kind r on unit r; all ranks then tell their error, and the wire refuses to go on."""
    told: list[str] = []
    with wire_on(rank, name, own_group=True) as wire:
        me = rank.rank
        with _error_text(MismatchError, told):
            _collective(wire, kinds[me], Label(units[me], "forward", f"block{units[me]}"), numels[me])
        with _error_text(MismatchError, told):
            wire.all_reduce(torch.zeros(3), LABEL).wait()
    return told


SAME = ["all_gather", "all_gather", "all_gather"]
DISAGREEMENTS = {
    "units of one shape in another order": (SAME, [6, 6, 6], [1, 2, 1]),
    "units of other sizes": (SAME, [6, 7, 6], [1, 2, 1]),
    "sizes of one unit": (SAME, [6, 7, 6], [1, 1, 1]),
    "reductions of two units": (["reduce_scatter"] * 3, [6, 6, 6], [1, 2, 1]),
    "a large and a small reduction": (["reduce_scatter"] * 3, [60_000, 6, 6], [1, 2, 1]),
    "gather against reduction": (["all_gather", "reduce_scatter", "all_gather"], [6, 6, 6], [1, 1, 1]),
    "all-reduce against gather": (["all_reduce", "foreign_all_gather", "all_reduce"], [6, 6, 6], [1, 1, 1]),
    "broadcast against all-reduce": (["all_reduce", "broadcast", "all_reduce"], [6, 6, 6], [1, 1, 1]),
    "all ranks different": (SAME, [6, 6, 6], [1, 2, 3]),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", DISAGREEMENTS)
@pytest.mark.parametrize("name", LABELLED)
def test_a_mismatch_is_an_error_on_all_ranks_that_names_both_units(
    ranks: Pools, name: str, case: str, size: int
) -> None:
    kinds, numels, units = DISAGREEMENTS[case]
    for told, again in ranks(size).run(_disagree, name, kinds[:size], numels[:size], units[:size]):
        for rank in range(size):
            assert f"block{units[rank]}" in told
        assert "expected: rank" in told
        assert "got: rank" in told
        assert "remedy:" in told
        assert again == told, "a wire that failed says the same again"


def _runs_one_more(rank: Rank, name: str) -> list[str]:
    told: list[str] = []
    with wire_on(rank, name, own_group=True) as wire:
        shard = wire.empty(6, torch.float32, BufferRole.SHARD).zero_()
        full = torch.empty(6 * rank.world_size)
        for unit in range(3):
            wire.all_gather(full, shard, Label(unit, "forward", f"block{unit}")).wait()
        with _error_text(MismatchError, told):
            if rank.rank == 1:
                wire.all_gather(full, shard, Label(3, "forward", "block3")).wait()
            wire.quiesce() if name == "shared_memory" else wire.all_reduce(torch.zeros(1), LABEL).wait()
    return told


@pytest.mark.parametrize("name", LABELLED)
def test_a_rank_that_runs_one_unit_more_is_named(ranks: Pools, name: str) -> None:
    for (told,) in ranks(2).run(_runs_one_more, name):
        assert "block3" in told


def _stays_away(rank: Rank, name: str) -> list[str]:
    """Rank 1 uses the wire once, then sleeps past everybody's patience."""
    told: list[str] = []
    with wire_on(rank, name, own_group=True, timeout_s=0.5) as wire:
        wire.all_reduce(torch.zeros(3), Label(7, "norm", "early")).wait()
        if rank.rank == 1:
            time.sleep(1.5)
        else:
            with _error_text(WireError, told):
                wire.all_reduce(torch.zeros(3), Label(8, "norm", "late")).wait()
            with _error_text(WireError, told):
                wire.all_reduce(torch.zeros(3), LABEL).wait()
    return told


@pytest.mark.parametrize("name", LABELLED)
def test_an_absent_rank_is_named_with_the_label_it_was_waited_for_at(ranks: Pools, name: str) -> None:
    told = ranks(3).run(_stays_away, name)
    for rank in (0, 2):
        first, again = told[rank]
        assert "rank 1" in first
        assert "late" in first
        assert again == first
    if name == "shared_memory":
        assert "early" in told[0][0], "the last collective of the absent rank is told"


def _one_leaves(rank: Rank) -> list[str]:
    told: list[str] = []
    with wire_on(rank, "shared_memory", own_group=True) as wire:
        wire.all_reduce(torch.zeros(3), LABEL).wait()
        if rank.rank == 1:
            wire.close()
            with _error_text(WireError, told):
                wire.all_reduce(torch.zeros(3), LABEL)
        else:
            with _error_text(WireError, told):
                wire.all_reduce(torch.zeros(3), LABEL).wait()
    return told


def test_a_rank_that_closed_its_wire_is_named(ranks: Pools) -> None:
    (waiting,), (left,), (other,) = ranks(3).run(_one_leaves)
    assert "rank 1" in waiting
    assert "closed" in waiting
    assert "rank 1" in other
    assert "closed" in left


def _last_rank_dies(rank: Rank, names: tuple[str, ...]) -> list[str]:
    """The last rank is killed inside a collective of every wire; the others tell what each wire said."""
    told: list[str] = []
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(wire_on(rank, name, own_group=True, timeout_s=30)) for name in names]
        for wire in wires:
            wire.empty(1000, torch.float32, BufferRole.SHARD)
            wire.all_reduce(torch.zeros(3), LABEL).wait()
        if rank.rank == rank.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for wire in wires:
            with _error_text(WireError, told):
                wire.all_reduce(torch.zeros(3), Label(9, "norm", "block9")).wait()
    return told


def test_a_rank_that_died_is_noticed_and_named_and_nothing_stays_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    pool = RankPool(3)
    try:
        outcomes = pool.outcomes(_last_rank_dies, ("shared_memory", "gloo_p2p", "collectives"))
        assert [outcome.has_died for outcome in outcomes] == [False, False, True]
        for outcome in outcomes[:2]:
            assert outcome.error is None, outcome.traceback
            by_memory, by_message, _by_collectives = outcome.value
            assert "rank 2" in by_memory
            assert "block9" in by_memory
            assert "died" in by_memory
            assert "block9" in by_message
    finally:
        pool.close()
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "fsdp" in name}


def test_ranks_killed_at_any_time_leave_nothing_in_dev_shm(ranks: Pools) -> None:
    before = set(os.listdir("/dev/shm"))
    pool = ranks(2)
    outcomes = pool.outcomes(_all_die)
    assert all(outcome.has_died for outcome in outcomes)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "fsdp" in name}


def _all_die(rank: Rank) -> None:
    with wire_on(rank, "shared_memory") as wire:
        shard = wire.empty(1000, torch.float32, BufferRole.SHARD)
        wire.all_gather(torch.empty(1000 * rank.world_size), shard, LABEL)
        os.kill(os.getpid(), signal.SIGKILL)


def _wrong_arguments(rank: Rank, name: str) -> list[str]:
    told: list[str] = []
    with wire_on(rank, name, own_group=True) as wire:
        with _error_text(WireError, told):
            wire.all_gather(torch.empty(7), torch.empty(3), LABEL)
        with _error_text(WireError, told):
            wire.reduce_scatter(torch.empty(3), torch.empty(6, dtype=torch.bfloat16), LABEL)
        tensor = torch.ones(3)
        wire.all_reduce(tensor, LABEL).wait()  # refused before anything was sent: the wire is whole
        assert tensor.tolist() == [2.0] * 3
    return told


@pytest.mark.parametrize("name", LABELLED)
def test_wrong_sizes_and_dtypes_are_refused_before_anything_is_sent(ranks: Pools, name: str) -> None:
    for sizes, dtypes in ranks(2).run(_wrong_arguments, name):
        assert "expected: 6" in sizes
        assert "got: 7" in sizes
        assert "torch.bfloat16" in dtypes
