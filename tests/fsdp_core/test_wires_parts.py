"""The parts of the wires that need no peer: envelopes, counting, sums in order, shared memory blocks."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_core.comm.counting import HostLayout, even_spans
from fsdp_core.comm.envelope import ENVELOPE_BYTES, KINDS, OPS, Envelope, mismatch_error, tag_of
from fsdp_core.comm.pieces import CHUNK_BYTES, combine_into
from fsdp_core.comm.shm_board import ENTRY_BYTES, MAX_AHEAD, NOWHERE, NUM_ENTRIES, Board, Place, Word
from fsdp_core.comm.shm_memory import (
    PAGE,
    SPARE_BYTES,
    Home,
    PageMap,
    PeerHome,
    SharedFile,
    can_see_private_pages,
)
from fsdp_core.comm.wire import Label, WireCounter
from fsdp_core.errors import MismatchError, WireError

LABEL = Label(4, "backward", "encoder.block.4")


# Envelopes ------------------------------------------------------------------------------------------------------------


@given(
    st.builds(
        Envelope,
        sequence=st.integers(0, 2**40),
        kind=st.sampled_from(KINDS),
        label=st.builds(Label, st.integers(-1, 10**6), st.sampled_from(["forward", "norm"]), st.just("a.b")),
        numel=st.integers(0, 2**45),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex64]),
        op=st.sampled_from(OPS),
        argument=st.integers(-1, 2**40),
    )
)
def test_an_envelope_survives_packing(envelope: Envelope) -> None:
    packed = envelope.pack()
    assert len(packed) == ENVELOPE_BYTES
    assert Envelope.unpack(packed) == envelope


def test_a_long_unit_name_keeps_its_end() -> None:
    name = "outer." * 40 + "blocks.17"
    assert Envelope.unpack(Envelope(0, "all_gather", Label(1, "forward", name)).pack()).label.unit.endswith("blocks.17")


def test_tags_ignore_the_sequence_number_and_nothing_else() -> None:
    first = Envelope(1, "all_gather", LABEL, 8, torch.float32)
    assert tag_of(first.pack()) == tag_of(Envelope(2, "all_gather", LABEL, 8, torch.float32).pack())
    assert tag_of(first.pack()) != tag_of(Envelope(1, "all_gather", LABEL, 9, torch.float32).pack())
    assert 0 <= tag_of(first.pack()) < 2**31


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(WireError, match=r"torch\.quint8"):
        Envelope(0, "all_gather", LABEL, 1, torch.quint8).pack()


def test_a_mismatch_names_all_sides() -> None:
    by_rank = {rank: Envelope(5, "all_gather", Label(rank, "forward", f"u{rank}"), 8).pack() for rank in (4, 6, 7)}
    error = mismatch_error(by_rank, mine=6)
    assert isinstance(error, MismatchError)
    assert error.unit == "u6"
    assert "rank 6" in str(error.expected)
    assert "rank 4" in str(error.got)
    assert "u7" in str(error.got)


# Counting -------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(1, 9))
def test_even_spans_cover_everything_once(numel: int, parts: int) -> None:
    spans = even_spans(numel, parts)
    assert len(spans) == parts
    assert spans[0][0] == 0
    assert spans[-1][1] == numel
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    sizes = [stop - start for start, stop in spans]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("ranks", "me", "host", "expected"),
    [
        ((0, 1, 2, 3), 1, 2, (10, 20)),
        ((0, 2), 0, 2, (0, 10)),
        ((5, 4), 0, 2, (10, 0)),
        ((0, 1, 2, 3), 1, None, (30, 0)),
    ],
    ids=["two hosts", "one rank per host", "any order", "no declared size"],
)
def test_bytes_are_split_by_declared_host(
    ranks: tuple[int, ...], me: int, host: int | None, expected: tuple[int, int]
) -> None:
    counter = WireCounter()
    HostLayout(ranks, me, host).record(counter, "all_gather", 10)
    assert (counter.intra_host_bytes["all_gather"], counter.cross_host_bytes["all_gather"]) == expected


def test_bytes_may_differ_by_peer() -> None:
    counter = WireCounter()
    HostLayout((0, 1, 2, 3), 3, 2).record(counter, "all_reduce", [1, 10, 100, 1000])
    assert (counter.intra_host_bytes["all_reduce"], counter.cross_host_bytes["all_reduce"]) == (100, 11)


def test_a_host_of_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks_per_host"):
        HostLayout((0, 1), 0, 0)


# Sums in order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 5, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 3])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_sums_are_in_order_and_may_alias(count: int, numel: int) -> None:
    generator = torch.Generator().manual_seed(count)
    values = [torch.randn(numel, generator=generator) * 10**k for k in range(count)]
    expected = values[0]
    for value in values[1:]:
        expected = expected + value
    for position in range(count):  # the target is one of the sources
        sources = [value.clone() for value in values]
        combine_into([sources[position]], sources, torch.add)
        assert torch.equal(sources[position], expected)
    sources = [value.clone() for value in values]
    combine_into(sources, sources, torch.add)
    assert all(torch.equal(source, expected) for source in sources)


# Shared memory --------------------------------------------------------------------------------------------------------


@pytest.fixture
def home() -> Home:
    return Home(SharedFile.create("fsdp_core_test"))


def test_home_memory_is_found_by_its_peers(home: Home) -> None:
    home.empty(100, torch.float32)
    tensor = home.empty(1000, torch.float32)
    tensor.copy_(torch.arange(1000.0))
    place = home.find(tensor[10:20])
    assert place is not None
    peer = PeerHome(SharedFile.of_process(os.getpid(), home.file.fd))
    assert torch.equal(peer.tensor(place, torch.float32, 10), tensor[10:20])
    assert torch.equal(peer.tensor(place, torch.float32, 3, 5), tensor[15:18])
    peer.tensor(place, torch.float32, 1).fill_(-1.0)
    assert tensor[10] == -1


def test_memory_from_elsewhere_is_not_found(home: Home) -> None:
    tensor = home.empty(1000, torch.float32)
    assert home.find(torch.zeros(10)) is None
    assert home.find(tensor[:0]) is None
    assert home.find(torch.empty(0)) is None


def test_a_freed_block_is_used_again(home: Home) -> None:
    tensor = home.empty(1000, torch.float32)
    address = tensor.data_ptr()
    view = tensor[5:]
    del tensor
    gc.collect()
    other = home.empty(1000, torch.float32)
    assert other.data_ptr() != address, "a view still uses the first block"
    del view
    gc.collect()
    assert home.empty(1000, torch.float32).data_ptr() == address


def test_spare_memory_is_bounded_and_its_place_in_the_file_used_again(home: Home) -> None:
    nbytes = SPARE_BYTES // 2 + PAGE
    for _ in range(5):
        tensors = [home.empty(nbytes, torch.uint8) for _ in range(3)]
        del tensors
        gc.collect()
    home._collect()
    assert os.fstat(home.file.fd).st_blocks * 512 <= SPARE_BYTES
    assert os.fstat(home.file.fd).st_size <= 4 * nbytes


def test_zero_elements_need_no_memory(home: Home) -> None:
    assert home.empty(0, torch.float32).numel() == 0
    assert os.fstat(home.file.fd).st_blocks == 0


def test_space_that_is_not_there_is_refused(home: Home) -> None:
    with pytest.raises(WireError, match="not enough shared memory"):
        home.empty(1 << 50, torch.uint8)


def test_tensors_outlive_the_home() -> None:
    home = Home(SharedFile.create("fsdp_core_test"))
    tensor = home.empty(10, torch.float32).fill_(3)
    home.file.close()
    del home
    gc.collect()
    assert tensor.sum() == 30


def test_release_after_close_touches_no_other_file() -> None:
    file = SharedFile.create("fsdp_core_test")
    number = file.fd
    file.close()
    other = SharedFile.create("fsdp_core_other")
    os.posix_fallocate(other.fd, 0, PAGE)
    assert other.fd == number, "the test needs the number to be used again"
    file.release(0, PAGE)
    assert os.fstat(other.fd).st_blocks * 512 == PAGE


def test_the_file_of_a_process_that_is_gone_is_refused_with_a_remedy() -> None:
    with pytest.raises(WireError, match="gloo_p2p"):
        SharedFile.of_process(2**22 - 1, 3)


def test_private_pages_are_seen() -> None:
    assert can_see_private_pages()
    pages = PageMap()
    file = SharedFile.create("fsdp_core_test")
    file.reserve(0, 8 * PAGE)
    view = file.map(0, 8 * PAGE, private=True)
    tensor, address = torch.frombuffer(view.buffer, dtype=torch.uint8), view.address
    assert tensor.sum() == 0
    assert pages.num_private(address, 8 * PAGE) == 0
    tensor[3 * PAGE] = 1
    tensor[5 * PAGE : 7 * PAGE] = 1
    assert pages.num_private(address, 8 * PAGE) == 3
    view.advise(mmap.MADV_DONTNEED)
    assert pages.num_private(address, 8 * PAGE) == 0


# The board ------------------------------------------------------------------------------------------------------------


def _board(num_ranks: int, me: int, memory: mmap.mmap, pids: list[int], timeout_s: float = 0.3) -> Board:
    return Board(memory, list(range(num_ranks)), me, pids, timeout_s)


def _envelope(sequence: int, unit: int = 1) -> bytes:
    return Envelope(sequence, "all_gather", Label(unit, "forward", f"u{unit}"), 4).pack()


@pytest.fixture
def pair() -> tuple[Board, Board]:
    """Two ranks in one process."""
    memory = mmap.mmap(-1, 2 * (4096 + NUM_ENTRIES * ENTRY_BYTES))
    here = os.getpid()
    return _board(2, 0, memory, [here, here]), _board(2, 1, memory, [here, here])


def test_places_and_counters_are_seen_by_the_peer(pair: tuple[Board, Board]) -> None:
    first, second = pair
    assert not second.has(0, Word.ISSUED, 1)
    assert first.issue(_envelope(0), Place(4096, 8192, 12)) == 0
    assert second.has(0, Word.ISSUED, 1)
    assert second.place(0, 0) == Place(4096, 8192, 12)
    assert second.issue(_envelope(0)) == 0
    assert first.place(1, 0) == NOWHERE
    first.wait_issued(0)
    second.consumed(1)
    first.wait_consumed(0)
    assert not second.all_have(Word.CONSUMED, 1)


def test_a_mismatch_is_seen_by_both_whoever_comes_first(pair: tuple[Board, Board]) -> None:
    first, second = pair
    first.issue(_envelope(0, unit=1))
    with pytest.raises(MismatchError, match="u1"):
        second.issue(_envelope(0, unit=2))
    with pytest.raises(MismatchError, match="u2"):
        first.wait_consumed(0)
    with pytest.raises(MismatchError, match="u2"):
        first.issue(_envelope(1))


def test_a_late_rank_is_named(pair: tuple[Board, Board]) -> None:
    first, second = pair
    first.issue(_envelope(0, unit=5))
    with pytest.raises(WireError, match=r"rank 0 waited for rank 1[\s\S]*u5[\s\S]*never used this wire"):
        first.wait_issued(0)
    second.issue(_envelope(0, unit=5))
    with pytest.raises(WireError, match="rank 0 gave up"):
        second.wait_consumed(0)


def test_a_rank_that_is_far_ahead_waits(pair: tuple[Board, Board]) -> None:
    first, _ = pair
    for sequence in range(MAX_AHEAD):
        first.issue(_envelope(sequence))
    with pytest.raises(WireError, match="did not come"):
        first.issue(_envelope(MAX_AHEAD))


def test_the_ring_of_entries_wraps(pair: tuple[Board, Board]) -> None:
    for sequence in range(3 * NUM_ENTRIES):
        for board in pair if sequence % 2 else reversed(pair):
            board.issue(_envelope(sequence), Place(sequence, 0, 0))
            board.consumed(sequence + 1)
        assert pair[0].place(1, sequence).offset == sequence
    pair[0].wait_consumed(3 * NUM_ENTRIES - 1)


def test_a_dead_process_is_noticed_before_the_time_is_up() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        memory = mmap.mmap(-1, 2 * (4096 + NUM_ENTRIES * ENTRY_BYTES))
        board = _board(2, 0, memory, [os.getpid(), process.pid], timeout_s=60)
        process.kill()
        board.issue(_envelope(0))
        with pytest.raises(WireError, match="died"):  # not reaped yet: a zombie counts as dead
            board.wait_issued(0)
        board.close()
        board.close()
    finally:
        process.kill()
        process.communicate()
