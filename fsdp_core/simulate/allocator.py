"""A replay of CUDA's caching allocator over a tape: allocated, active and reserved bytes, and when it has to retry.

What is modelled (torch/c10's allocator, default settings): sizes in steps of 512 bytes; pools per stream, small
(up to 1 MiB, from segments of 2 MiB) and large (segments of 20 MiB up to 10 MiB, beyond that of the size rounded up
to 2 MiB); best fit, splitting and merging inside a segment; a block that another stream has used stays *active* after
the host let go of it, until that stream has got past; when a new segment does not fit, all unused whole segments are
given back after the device has been waited for (one *retry*), and if that is not enough the run is out of memory.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from fsdp_core.simulate import tape as t
from fsdp_core.simulate.timeline import Timeline

_ROUND = 512
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_LARGE_LIMIT = 10 << 20
_SEGMENT_ROUND = 2 << 20


@dataclass
class MemoryReport:
    """Bytes. peaks of the whole tape, and of the part after ``measure_from``; curve: (entry, allocated, active,
    reserved) where one of them reached a new value worth drawing. failed_at: the entry that found no memory."""

    allocated: int = 0
    active: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_active: int = 0
    peak_reserved: int = 0
    num_alloc_retries: int = 0
    failed_at: int | None = None
    peak_at: int = 0
    retries_at: list[int] = field(default_factory=list)
    curve: list[tuple[int, int, int, int]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Block:
    """A piece of a segment; neighbours by address."""

    nbytes: int
    pool: _Pool
    before: _Block | None = None
    after: _Block | None = None
    is_free: bool = False
    number: int = 0

    @property
    def is_whole_segment(self) -> bool:
        return self.before is None and self.after is None


class _Pool:
    """Free blocks of one stream and size class, by size, then by age."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[int, _Block] = {}

    def put(self, block: _Block) -> None:
        block.is_free = True
        insort(self._keys, (block.nbytes, block.number))
        self._blocks[block.number] = block

    def remove(self, block: _Block) -> None:
        block.is_free = False
        del self._keys[bisect_left(self._keys, (block.nbytes, block.number))]
        del self._blocks[block.number]

    def best_fit(self, nbytes: int) -> _Block | None:
        index = bisect_left(self._keys, (nbytes, -1))
        if index == len(self._keys):
            return None
        block = self._blocks[self._keys[index][1]]
        self.remove(block)
        return block

    def whole_segments(self) -> list[_Block]:
        return [block for block in self._blocks.values() if block.is_whole_segment]


class CachingAllocator:
    """One device's. Times are seconds of the timeline; ``usable_bytes``: what segments may take together."""

    def __init__(self, usable_bytes: int) -> None:
        self.report = MemoryReport()
        self._usable = usable_bytes
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._held: dict[int, _Block] = {}
        self._waiting: list[tuple[float, int, _Block]] = []  # let go by the host, a stream still uses them
        self._num_blocks = 0

    def alloc(self, name: int, nbytes: int, stream: int, now_s: float) -> bool:
        """False: out of memory."""
        self._take_back(now_s)
        if nbytes == 0:
            return True
        size = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
        is_small = size <= _SMALL
        pool = self._pools.setdefault((stream, is_small), _Pool(is_small))
        block = pool.best_fit(size) or self._new_segment(size, pool)
        if block is None:
            return False
        self._split(block, size)
        self._held[name] = block
        report = self.report
        report.allocated += block.nbytes
        report.active += block.nbytes
        report.peak_allocated = max(report.peak_allocated, report.allocated)
        report.peak_active = max(report.peak_active, report.active)
        report.peak_reserved = max(report.peak_reserved, report.reserved)
        return True

    def free(self, name: int, busy_until_s: float, now_s: float, is_shared: bool) -> None:
        """The host lets go. is_shared: streams other than the block's own have used it."""
        block = self._held.pop(name, None)
        if block is None:
            return  # empty
        self.report.allocated -= block.nbytes
        if is_shared and busy_until_s > now_s:
            heapq.heappush(self._waiting, (busy_until_s, block.number, block))
        else:
            self._give_back(block)

    def _take_back(self, now_s: float) -> None:
        while self._waiting and self._waiting[0][0] <= now_s:
            self._give_back(heapq.heappop(self._waiting)[2])

    def _give_back(self, block: _Block) -> None:
        self.report.active -= block.nbytes
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                neighbour.pool.remove(neighbour)
                self._merge(block, neighbour)
        block.pool.put(block)

    @staticmethod
    def _merge(block: _Block, neighbour: _Block) -> None:
        if neighbour is block.before:
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        block.nbytes += neighbour.nbytes

    def _split(self, block: _Block, size: int) -> None:
        rest = block.nbytes - size
        if rest < _ROUND if block.pool.is_small else rest <= _SMALL:
            return
        tail = self._block(rest, block.pool)
        tail.before, tail.after = block, block.after
        if block.after is not None:
            block.after.before = tail
        block.after, block.nbytes = tail, size
        block.pool.put(tail)

    def _block(self, nbytes: int, pool: _Pool) -> _Block:
        self._num_blocks += 1
        return _Block(nbytes, pool, number=self._num_blocks)

    def _new_segment(self, size: int, pool: _Pool) -> _Block | None:
        if pool.is_small:
            nbytes = _SMALL_SEGMENT
        elif size < _LARGE_LIMIT:
            nbytes = _LARGE_SEGMENT
        else:
            nbytes = -(-size // _SEGMENT_ROUND) * _SEGMENT_ROUND
        if self.report.reserved + nbytes > self._usable:
            self.report.num_alloc_retries += 1
            self._take_back(float("inf"))
            self._release_unused()
            if self.report.reserved + nbytes > self._usable:
                return None
        self.report.reserved += nbytes
        return self._block(nbytes, pool)

    def _release_unused(self) -> None:
        for pool in self._pools.values():
            for block in pool.whole_segments():
                pool.remove(block)
                self.report.reserved -= block.nbytes


def replay(
    tape: t.Tape, timeline: Timeline, usable_bytes: int, measure_from: int = 0, is_packed: bool = False
) -> MemoryReport:
    """The tape's blocks through the allocator, at the timeline's times. Peaks count from entry ``measure_from``.

    is_packed: what is alive at that entry lies in segments of its own then, and nothing unused is kept, as if the
    allocator's cache had been emptied and everything moved together; otherwise it lies where the entries before put it.
    """
    allocator = CachingAllocator(usable_bytes)
    report = allocator.report
    stream_of: dict[int, int] = {}
    shared: set[int] = set()
    begin = measure_from if is_packed else 0
    for alloc in _alive_at(tape, begin):
        stream_of[alloc.block] = alloc.stream
        allocator.alloc(alloc.block, alloc.nbytes, alloc.stream, timeline.host_s[begin] if begin else 0.0)
    for index, entry in enumerate(tape.entries[begin:], begin):
        if index == measure_from:
            report.peak_allocated, report.peak_active = report.allocated, report.active
            report.peak_reserved = report.reserved
        now = timeline.host_s[index]
        match entry:
            case t.Alloc():
                stream_of[entry.block] = entry.stream
                peak, retries = report.peak_allocated, report.num_alloc_retries
                if not allocator.alloc(entry.block, entry.nbytes, entry.stream, now):
                    report.failed_at = index
                    return report
                if report.peak_allocated > peak:
                    report.peak_at = index
                if report.num_alloc_retries > retries:
                    report.retries_at.append(index)
                report.curve.append((index, report.allocated, report.active, report.reserved))
            case t.UsedOn():
                if entry.stream != stream_of[entry.block]:
                    shared.add(entry.block)
            case t.Free():
                allocator.free(entry.block, timeline.busy_until_s[index], now, entry.block in shared)
                shared.discard(entry.block)
                report.curve.append((index, report.allocated, report.active, report.reserved))
    return report


def _alive_at(tape: t.Tape, entry: int) -> list[t.Alloc]:
    alive = {alloc.block: alloc for alloc in tape.held}
    for one in tape.entries[:entry]:
        if isinstance(one, t.Alloc):
            alive[one.block] = one
        elif isinstance(one, t.Free):
            del alive[one.block]
    return list(alive.values())
