"""The caching allocator by hand: sequences whose segments, splits and retries were worked out on paper."""

from __future__ import annotations

import random

import pytest

from fsdp_core.simulate import tape as t
from fsdp_core.simulate.allocator import CachingAllocator, replay
from fsdp_core.simulate.hardware import Hardware
from fsdp_core.simulate.timeline import play

MIB = 1 << 20
ENDLESS = 1 << 60


def allocator(usable: int = ENDLESS) -> CachingAllocator:
    return CachingAllocator(usable)


def held(a: CachingAllocator) -> tuple[int, int, int]:
    return a.report.allocated, a.report.active, a.report.reserved


def take(a: CachingAllocator, name: int, nbytes: int, stream: int = 0, now: float = 0.0) -> bool:
    return a.alloc(name, nbytes, stream, now)


def give(a: CachingAllocator, name: int, busy_until: float = 0.0, now: float = 0.0, is_shared: bool = False) -> None:
    a.free(name, busy_until, now, is_shared)


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_sizes_of_blocks_and_of_their_segments(nbytes: int, allocated: int, reserved: int) -> None:
    """512-byte steps; small segments of 2 MiB, large ones of 20 MiB, beyond 10 MiB the size rounded up to 2 MiB.

    A rest of at most 1 MiB of a large segment is not split off and counts as allocated."""
    a = allocator()
    assert take(a, 0, nbytes)
    assert held(a)[2] == reserved
    rest = reserved - allocated
    assert held(a)[0] == (allocated if nbytes <= MIB or rest > MIB else reserved)


def test_a_split_segment_serves_the_next_request_and_merges_again() -> None:
    a = allocator()
    take(a, 0, 4 * MIB)
    take(a, 1, 4 * MIB)
    assert held(a) == (8 * MIB, 8 * MIB, 20 * MIB)
    give(a, 0)
    give(a, 1)
    take(a, 2, 20 * MIB)  # fits only if the three pieces are one again
    assert held(a) == (20 * MIB, 20 * MIB, 20 * MIB)


def test_best_fit_takes_the_smallest_that_is_large_enough() -> None:
    a = allocator()
    for name, size in enumerate((30, 14, 22)):
        take(a, name, size * MIB)
    for name in range(3):
        give(a, name)
    take(a, 3, 20 * MIB)  # the 22 leaves 2 MiB over, which are split off
    take(a, 4, 14 * MIB)
    take(a, 5, 30 * MIB)
    assert held(a)[2] == 66 * MIB


def test_streams_have_pools_of_their_own() -> None:
    a = allocator()
    take(a, 0, 16 * MIB, stream=t.GATHER)
    give(a, 0)
    take(a, 1, 16 * MIB, stream=t.COMPUTE)
    assert held(a) == (16 * MIB, 16 * MIB, 32 * MIB)


def test_a_block_that_another_stream_still_uses_stays_active() -> None:
    a = allocator()
    take(a, 0, 16 * MIB, stream=t.GATHER)
    give(a, 0, busy_until=5.0, now=1.0, is_shared=True)
    assert held(a) == (0, 16 * MIB, 16 * MIB)
    take(a, 1, 16 * MIB, stream=t.GATHER, now=4.0)  # too early
    assert held(a) == (16 * MIB, 32 * MIB, 32 * MIB)
    take(a, 2, 16 * MIB, stream=t.GATHER, now=5.0)
    assert held(a) == (32 * MIB, 32 * MIB, 32 * MIB)


def test_a_block_used_by_its_own_stream_alone_is_free_at_once() -> None:
    a = allocator()
    take(a, 0, 16 * MIB)
    give(a, 0, busy_until=5.0, now=1.0)
    take(a, 1, 16 * MIB, now=1.0)
    assert held(a)[2] == 16 * MIB


def test_a_retry_gives_unused_segments_back_and_goes_on() -> None:
    a = allocator(usable=40 * MIB)
    take(a, 0, 20 * MIB)
    give(a, 0)
    assert take(a, 1, 30 * MIB)  # 20 are cached; 50 would be too much
    assert held(a) == (30 * MIB, 30 * MIB, 30 * MIB)
    assert a.report.num_alloc_retries == 1


def test_a_retry_waits_for_blocks_that_other_streams_use() -> None:
    a = allocator(usable=40 * MIB)
    take(a, 0, 30 * MIB, stream=t.GATHER)
    give(a, 0, busy_until=9.0, now=0.0, is_shared=True)
    assert take(a, 1, 30 * MIB, stream=t.GATHER, now=1.0)
    assert held(a) == (30 * MIB, 30 * MIB, 30 * MIB)
    assert a.report.num_alloc_retries == 1


def test_a_segment_with_a_used_piece_cannot_be_given_back() -> None:
    a = allocator(usable=40 * MIB)
    take(a, 0, 4 * MIB)  # 16 of its segment's 20 MiB are free and stay
    assert not take(a, 1, 30 * MIB)
    assert held(a) == (4 * MIB, 4 * MIB, 20 * MIB)


def test_out_of_memory_says_where() -> None:
    hardware = Hardware(1.0, 1.0, 1.0, 40 * MIB, 8, 1.0, 1.0)
    tape = t.Tape([t.Alloc(1, 30 * MIB, 0, "mm"), t.Alloc(2, 30 * MIB, 0, "mm")], [t.Alloc(0, 4 * MIB, 0, "shard")])
    report = replay(tape, play(tape, hardware), 64 * MIB)
    assert report.failed_at == 1
    assert report.num_alloc_retries == 1


def test_peaks_count_from_the_entry_that_was_asked_for() -> None:
    hardware = Hardware(1.0, 1.0, 1.0, ENDLESS, 8, 1.0, 1.0)
    first_step = [t.Alloc(1, 30 * MIB, 0, "mm"), t.Free(1)]
    tape = t.Tape([*first_step, t.Alloc(2, 12 * MIB, 0, "mm"), t.Free(2)])
    report = replay(tape, play(tape, hardware), ENDLESS, measure_from=2)
    assert (report.peak_allocated, report.peak_reserved) == (12 * MIB, 30 * MIB)


def test_what_stays_lies_in_the_holes_of_the_first_step_or_in_segments_of_its_own() -> None:
    """12 MiB stay, cut from a segment of 30 that the first step left; the second step needs 30 again."""
    hardware = Hardware(1.0, 1.0, 1.0, ENDLESS, 8, 1.0, 1.0)
    first_step = [t.Alloc(1, 30 * MIB, 0, "mm"), t.Free(1), t.Alloc(2, 12 * MIB, 0, "state")]
    tape = t.Tape([*first_step, t.Alloc(3, 30 * MIB, 0, "mm"), t.Free(3)])
    line = play(tape, hardware)
    assert replay(tape, line, ENDLESS, measure_from=3).peak_reserved == 60 * MIB
    packed = replay(tape, line, ENDLESS, measure_from=3, is_packed=True)
    assert (packed.peak_allocated, packed.peak_reserved) == (42 * MIB, 42 * MIB)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_asked_for_the_books_balance(seed: int) -> None:
    """Blocks in use never exceed what is active, active never what is reserved; all given back, all can be returned."""
    rng, a, live, now = random.Random(seed), allocator(), {}, 0.0
    for name in range(400):
        now += rng.random()
        if live and rng.random() < 0.5:
            victim = rng.choice(list(live))
            live.pop(victim)
            give(a, victim, busy_until=now + rng.random() * 3, now=now, is_shared=rng.random() < 0.5)
        nbytes = int(2 ** rng.uniform(0, 25))
        live[name] = nbytes
        assert take(a, name, nbytes, stream=rng.randrange(3), now=now)
        allocated, active, reserved = held(a)
        assert sum(live.values()) <= allocated <= active <= reserved
    for name in live:
        give(a, name)
    a.alloc(-1, 0, 0, now + 10)  # nothing: only looks who has finished
    assert held(a)[:2] == (0, 0)
    a._release_unused()
    assert a.report.reserved == 0
