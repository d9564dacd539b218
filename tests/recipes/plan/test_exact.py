"""The exact tier: what a plan says about collectives and live bytes, against real ranks over sockets.

The recording is of devices without a lag (``is_inline``), as the CPUs are that it is compared with.
"""

from __future__ import annotations

from itertools import product

import pytest

from fsdp_core.simulate import tape as t
from recipes.plan.record import RecordedRun, record_run
from recipes.plan.traffic import traffic_of
from recipes.schema import RecipeConfig
from tests.recipes.plan.configs_in_tests import tiny
from tests.recipes.plan.real_steps import real_steps
from tests.support.ranks import Pools

MODELS = ("gpt", "t5", "deepvit")
ACCUMULATION = ((1, False), (2, False), (2, True))  # micro-batches, with communication
Setting = tuple[int, bool, bool, tuple[int, bool]]  # F, reshard, prefetch, accumulation


def settings(world_size: int) -> list[Setting]:
    return list(product(sorted({1, 2, world_size}), (True, False), (True, False), ACCUMULATION))


def chosen(world_size: int) -> list[Setting]:
    """A part in which every pair of values of two settings occurs."""
    return [one for number, one in enumerate(settings(world_size)) if number % 5 in (0, 3)]


def config_of(kind: str, world_size: int, setting: Setting) -> RecipeConfig:
    factor, reshard, prefetch, (micro_batches, communicates) = setting
    return tiny(
        kind,
        sharding__wire="collectives",
        sharding__gather_buffers="allocator",
        sharding__factor=factor,
        sharding__reshard_after_forward=reshard,
        sharding__backward_prefetch=prefetch,
        train__global_batch=world_size * micro_batches,
        train__micro_batch=1,
        train__accumulate_with_communication=communicates,
    )


def compare(ranks: Pools, kind: str, world_size: int, wanted: list[Setting]) -> None:
    configs = [config_of(kind, world_size, setting) for setting in wanted]
    real = ranks(world_size).run(real_steps, configs, 2, timeout_s=300)
    for number, (setting, config) in enumerate(zip(wanted, configs, strict=True)):
        recorded = record_run(config, world_size, 2, is_inline=True)
        collectives = [one for one in recorded.tape.entries[recorded.last_step :] if isinstance(one, t.Collective)]
        rows = [(one.primitive, one.nbytes, len(one.ranks)) for one in collectives]
        traffic = traffic_of([one for one in collectives if one.phase != "quiesce"], 2)  # the wires do not count it
        planned = {
            primitive: sum(row.nbytes for row in traffic.rows if row.primitive == primitive)
            for primitive in {row.primitive for row in traffic.rows}
        }
        for step in (outcome[number] for outcome in real):
            assert rows == step.rows, setting
            assert planned == pytest.approx({name: sent for name, sent in step.counted.items() if sent}, abs=2), setting
            assert live_peak(recorded) == pytest.approx(step.ledger, rel=0.01), setting


def live_peak(recorded: RecordedRun) -> int:
    """Most bytes of shards, gradients and buffers of the engine at once, in the last step."""
    live = most = 0
    sizes: dict[int, int] = {}
    for index, entry in enumerate([*recorded.tape.held, *recorded.tape.entries]):
        if isinstance(entry, t.Alloc) and entry.what.startswith("engine."):
            sizes[entry.block] = entry.nbytes
            live += entry.nbytes
        elif isinstance(entry, t.Free):
            live -= sizes.pop(entry.block, 0)
        if index - len(recorded.tape.held) >= recorded.last_step:
            most = max(most, live)
    return most


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_order_bytes_and_live_peak_are_those_of_real_ranks(ranks: Pools, kind: str, world_size: int) -> None:
    compare(ranks, kind, world_size, chosen(world_size)[:: 2 if kind == "gpt" else 4])


@pytest.mark.parametrize("factor", [2, 4])
def test_shared_memory_needs_no_buffers_and_reads_each_shard_once(ranks: Pools, factor: int) -> None:
    """The wire that ``auto`` takes on CPU; four ranks of one host."""
    buffers = {"sharding__gather_buffers": "allocator", "sharding__factor": factor}
    config = tiny("gpt", **buffers, train__global_batch=8, train__micro_batch=1)
    (steps, *_) = zip(*ranks(4).run(real_steps, [config], 4, timeout_s=300), strict=True)
    recorded = record_run(config, 4, 4, is_inline=True)
    collectives = [one for one in recorded.tape.entries[recorded.last_step :] if isinstance(one, t.Collective)]
    planned: dict[str, int] = {}
    for row in traffic_of([one for one in collectives if one.phase != "quiesce"], 4).rows:
        planned[row.primitive] = planned.get(row.primitive, 0) + row.nbytes
    for step in steps:
        sent = {name: nbytes for name, nbytes in step.counted.items() if nbytes}
        assert sent["all_gather"] == pytest.approx(planned["all_gather"], abs=2)
        assert sent["reduce_scatter"] == pytest.approx(planned["reduce_scatter"], abs=2)
        assert live_peak(recorded) == recorded.held.peak == pytest.approx(step.ledger, rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_the_same_over_the_whole_grid(ranks: Pools, kind: str, world_size: int) -> None:
    compare(ranks, kind, world_size, settings(world_size))
