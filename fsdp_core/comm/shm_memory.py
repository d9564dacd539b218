"""Memory that the ranks of one host share: nameless files in memory, and tensors that live in them.

| object | file | written by | read by |
|---|---|---|---|
| ``Home`` | one per rank | its rank; peers in an all-reduce | peers, which map blocks when told of them |
| ``ShardFile`` | one per group | every rank its own slice | everybody |
| ``PrivateView`` | copy-on-write mapping of a slot of the ``ShardFile`` | this rank, unseen by others | this rank |

In the ``ShardFile`` the slices of one unit lie side by side: together they *are* the gathered flat parameter.
The files are memfds: they have no name anywhere, so nothing is left behind however a process dies, and the size
of /dev/shm (64 MB in many containers) does not limit them. Peers open them through /proc while the owner lives.
Space is reserved (posix_fallocate) before it is used: running out is an error here, not a SIGBUS in a copy.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import functools
import mmap
import os
import weakref
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from fsdp_core.comm.shm_board import Place
from fsdp_core.errors import WireError

PAGE = mmap.PAGESIZE
SPARE_BYTES = 64 << 20  # freed blocks kept for the next request of the same size
_MADV_POPULATE_READ = 22  # Linux 5.14; map all pages now instead of at first touch
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_fallocate = getattr(_libc, "fallocate", None)  # Linux only, as is the whole wire; importing must work elsewhere
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def round_up(nbytes: int) -> int:
    """To whole pages."""
    return -(-nbytes // PAGE) * PAGE


def available_bytes() -> int:
    """Memory this process can still get: what the machine has left, less if a control group sets a limit."""
    available = 1 << 62
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            for line in (group / "memory.stat").read_text().splitlines():
                if line.startswith(("inactive_file ", "active_file ")):  # the kernel drops these when asked for memory
                    used -= int(line.split()[1])
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass  # no such files here: reserving will tell
    return available


class Mapping:
    """A range of a file in this process's memory, until nothing uses ``buffer`` any more.

    Python's own mmap object would keep a duplicate of the file descriptor open, and a model has hundreds of these.
    """

    def __init__(self, fd: int, offset: int, nbytes: int, flags: int) -> None:
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise WireError(f"cannot map {nbytes} bytes of shared memory", got=os.strerror(number))
        self.address, self.nbytes = address, nbytes
        self.buffer = (ctypes.c_char * nbytes).from_address(address)
        # not at exit: tensors may still be used by other exit handlers, and the kernel unmaps anyway
        weakref.finalize(self.buffer, _libc.munmap, address, nbytes).atexit = False

    def advise(self, advice: int) -> None:
        if _libc.madvise(self.address, self.nbytes, advice):
            raise OSError(ctypes.get_errno(), "madvise")


class SharedFile:
    """One nameless file in memory."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, name: str) -> SharedFile:
        try:
            return cls(os.memfd_create(name))
        except (AttributeError, OSError) as error:
            raise WireError("this system has no memfd_create, which the shared-memory wire needs", got=error) from error

    @classmethod
    def of_process(cls, pid: int, fd: int) -> SharedFile:
        """Open another process's file."""
        path = f"/proc/{pid}/fd/{fd}"
        try:
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise WireError(
                f"cannot open the shared memory of process {pid}",
                expected=f"{path} can be opened (same user, same process namespace)",
                got=error,
                remedy="use wire='gloo_p2p'",
            ) from error

    def reserve(self, offset: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        try:
            if nbytes > available_bytes():
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            os.posix_fallocate(self.fd, offset, nbytes)
        except OSError as error:
            raise WireError(
                "not enough shared memory",
                expected=f"{nbytes} bytes",
                got=f"{error.strerror or error} ({available_bytes()} bytes available)",
                remedy="free memory, raise the limit of the container or job, or use wire='gloo_p2p'",
            ) from error

    def release(self, offset: int, nbytes: int) -> None:
        """Give whole pages back to the system; the file keeps its size and reads zero there."""
        if self.fd < 0 or _fallocate is None:
            return  # closed: the pages go when the last mapping goes
        _fallocate(self.fd, _PUNCH_HOLE_KEEP_SIZE, offset, nbytes)

    def map(self, offset: int, nbytes: int, *, private: bool = False, populate: bool = True) -> Mapping:
        """Map a page-aligned range. Private: copy on write, and reads still see what others write to the file."""
        mapping = Mapping(self.fd, offset, nbytes, mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED)
        if populate:
            with contextlib.suppress(OSError):  # an older kernel maps pages at first touch
                mapping.advise(_MADV_POPULATE_READ)
        return mapping

    def close(self) -> None:
        self._close()
        self.fd = -1  # the number may soon name another file


def tensor_on(memory: Mapping | memoryview, dtype: torch.dtype, numel: int, start: int = 0) -> Tensor:
    """A 1-D tensor on mapped memory from byte ``start``; the mapping lives as long as the tensor's storage."""
    if isinstance(memory, Mapping):
        memory = memoryview(memory.buffer)
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start)


@dataclass(eq=False)
class _Block:
    offset: int
    nbytes: int
    mapping: Mapping

    @property
    def address(self) -> int:
        return self.mapping.address


class Home:
    """The memory one rank offers its peers: gradient buffers, and copies of what was allocated elsewhere."""

    def __init__(self, file: SharedFile) -> None:
        self.file = file
        self._end = 0
        self._holes: list[tuple[int, int]] = []  # (nbytes, offset), sorted
        self._spare: list[_Block] = []
        self._freed: deque[_Block] = deque()  # filled by finalizers at any moment, emptied in empty()
        self._live: dict[int, _Block] = {}  # by address
        self._addresses: list[int] = []  # sorted keys of _live

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised tensor in a block of its own; the block is freed with the tensor's storage."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        self._collect()
        block = self._take(round_up(numel * dtype.itemsize))
        self._live[block.address] = block
        bisect.insort(self._addresses, block.address)
        handle = memoryview(block.mapping.buffer)  # dies with the storage, the mapping may live on as a spare
        weakref.finalize(handle, self._freed.append, block).atexit = False
        return tensor_on(handle, dtype, numel)

    def find(self, tensor: Tensor) -> Place | None:
        """Where ``tensor`` lies in this home, ``None`` when it is not (all) in one of its blocks."""
        address = tensor.data_ptr()
        index = bisect.bisect_right(self._addresses, address) - 1
        if index < 0 or tensor.numel() == 0:
            return None
        block = self._live[self._addresses[index]]
        start = address - block.address
        if start + tensor.numel() * tensor.element_size() > block.nbytes:
            return None
        return Place(block.offset, block.nbytes, start)

    def _take(self, nbytes: int) -> _Block:
        for index, block in enumerate(self._spare):
            if block.nbytes == nbytes:
                return self._spare.pop(index)
        offset = self._find_hole(nbytes)
        self.file.reserve(offset, nbytes)
        if offset == self._end:
            self._end += nbytes
        return _Block(offset, nbytes, self.file.map(offset, nbytes))

    def _find_hole(self, nbytes: int) -> int:
        index = bisect.bisect_left(self._holes, (nbytes, -1))
        if index == len(self._holes):
            return self._end
        size, offset = self._holes.pop(index)
        if size > nbytes:
            bisect.insort(self._holes, (size - nbytes, offset + nbytes))
        return offset

    def _collect(self) -> None:
        """Take back the blocks whose tensors have died; past ``SPARE_BYTES`` return memory to the system."""
        while self._freed:
            block = self._freed.popleft()
            del self._live[block.address]
            self._addresses.remove(block.address)
            self._spare.append(block)
        while sum(block.nbytes for block in self._spare) > SPARE_BYTES:
            oldest = self._spare.pop(0)
            self.file.release(oldest.offset, oldest.nbytes)
            bisect.insort(self._holes, (oldest.nbytes, oldest.offset))


class PeerHome:
    """A peer's home, mapped block by block as its entries name them."""

    MAX_BLOCKS = 1024  # a mapping costs its pages' entries only; with F = 1 every unit's gradient is a block

    def __init__(self, file: SharedFile) -> None:
        self._file = file
        self._blocks: dict[tuple[int, int], Mapping] = {}

    def tensor(self, place: Place, dtype: torch.dtype, numel: int, start_numel: int = 0) -> Tensor:
        """``numel`` elements of the peer's data, from its element ``start_numel``."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        key = (place.offset, place.nbytes)
        mapping = self._blocks.pop(key, None)
        if mapping is None:
            mapping = self._file.map(place.offset, place.nbytes)
        self._blocks[key] = mapping  # last used last
        if len(self._blocks) > self.MAX_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return tensor_on(mapping, dtype, numel, place.start + start_numel * dtype.itemsize)

    def close(self) -> None:
        self._blocks.clear()
        self._file.close()


@dataclass(eq=False)
class ShardSlot:
    """One unit's slices, side by side: the gathered flat parameter as it lies in the group's file."""

    ordinal: int  # the same on all ranks
    offset: int  # in the file
    numel: int  # of one slice
    dtype: torch.dtype
    whole: Tensor  # F * numel elements, for reading
    address: int  # of this rank's slice
    views: dict[torch.dtype, PrivateView] = field(default_factory=dict)
    is_paired: bool = False  # all ranks were seen to gather this slot together


class ShardFile:
    """The flat shards of all ranks of a group. Slots are asked for in the same order on all ranks."""

    def __init__(self, file: SharedFile, group_size: int, group_rank: int) -> None:
        self._file, self._size, self._rank = file, group_size, group_rank
        self._end = 0
        self._num_slots = 0
        self._by_address: weakref.WeakValueDictionary[int, ShardSlot] = weakref.WeakValueDictionary()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """This rank's slice of a new slot."""
        slot, handle = self._new_slot(numel, dtype)
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        self._by_address[slot.address] = slot
        shard = tensor_on(handle, dtype, numel, self._rank * numel * dtype.itemsize)
        # the slot (and its pages) lives as long as the storage of the shard
        weakref.finalize(handle, self._free, slot, os.getpid()).atexit = False
        return shard

    def slot_of(self, shard: Tensor) -> ShardSlot | None:
        slot = self._by_address.get(shard.data_ptr()) if shard.numel() else None
        return slot if slot is not None and (slot.numel, slot.dtype) == (shard.numel(), shard.dtype) else None

    def view_of(self, slot: ShardSlot, dtype: torch.dtype) -> PrivateView:
        """The slot's copy-on-write view; in another dtype: of a second slot that holds the converted slices."""
        if dtype not in slot.views:
            if dtype == slot.dtype:
                slot.views[dtype] = PrivateView(self._file, slot)
            else:
                low, _ = self._new_slot(slot.numel, dtype)
                own = slice(self._rank * slot.numel, (self._rank + 1) * slot.numel)
                slot.views[dtype] = PrivateView(self._file, low, own=low.whole[own], source=slot.whole[own])
        return slot.views[dtype]

    def _new_slot(self, numel: int, dtype: torch.dtype) -> tuple[ShardSlot, memoryview]:
        nbytes = self._size * numel * dtype.itemsize
        offset, own = self._end, numel * dtype.itemsize
        self._end += round_up(nbytes)
        ordinal, self._num_slots = self._num_slots, self._num_slots + 1
        if nbytes == 0:
            return ShardSlot(ordinal, offset, 0, dtype, torch.empty(0, dtype=dtype), 0), memoryview(b"")
        self._file.reserve(offset + self._rank * own, own)  # own part only: it may be another memory node
        self._file.reserve(self._end - 1, 1)  # the file reaches the end of the slot, so that it can be mapped
        mapping = self._file.map(offset, round_up(nbytes), populate=False)
        whole = tensor_on(mapping, dtype, self._size * numel)
        address = mapping.address + self._rank * own
        return ShardSlot(ordinal, offset, numel, dtype, whole, address), memoryview(mapping.buffer)

    def _free(self, slot: ShardSlot, pid: int) -> None:
        if os.getpid() != pid:  # a forked child has the same mappings and must free nothing
            return
        for one in (slot, *(view.slot for view in slot.views.values() if view.is_converted)):
            own = one.numel * one.dtype.itemsize
            first = round_up(one.offset + self._rank * own)
            last = (one.offset + (self._rank + 1) * own) // PAGE * PAGE
            if last > first:  # pages shared with a neighbour's slice stay
                self._file.release(first, last - first)

    def close(self) -> None:
        self._file.close()


class PrivateView:
    """A unit's slices mapped copy-on-write: reads cost no copy, writes stay with this rank until ``restore``.

    A view in another dtype is of a converted copy: ``own`` is this rank's slice of it, refreshed from ``source``
    once per time that the shards may have changed, before peers read it.
    """

    def __init__(
        self, file: SharedFile, slot: ShardSlot, own: Tensor | None = None, source: Tensor | None = None
    ) -> None:
        numel = slot.whole.numel()
        self._nbytes = round_up(numel * slot.dtype.itemsize)
        self._mapping = file.map(slot.offset, self._nbytes, private=True)
        self.slot, self._own, self._source = slot, own, source
        self.tensor = tensor_on(self._mapping, slot.dtype, numel)
        self._address = self.tensor.data_ptr()
        self.is_fresh = not self.is_converted

    @property
    def is_converted(self) -> bool:
        return self._own is not None

    def refresh(self) -> None:
        """Convert this rank's slice, if it may be out of date."""
        if not self.is_fresh and self._own is not None and self._source is not None:
            self._own.copy_(self._source)
            self.is_fresh = True

    def expire(self) -> None:
        """The shards may change from now on."""
        self.is_fresh = not self.is_converted

    def restore(self, pages: PageMap) -> None:
        """Forget this rank's writes."""
        if pages.num_private(self._address, self._nbytes):
            self._mapping.advise(mmap.MADV_DONTNEED)


class PageMap:
    """The kernel's page table of this process: which pages of a copy-on-write range were written to.

    An entry has 8 bytes; the last one says whether the page is in memory (bit 7) or swapped out (bit 6), and whether
    it belongs to a file (bit 5). A page that is somewhere and of no file is a private copy.
    """

    _IS_PRIVATE: ClassVar[bytes] = bytes(1 if byte & 0xC0 and not byte & 0x20 else 0 for byte in range(256))

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)

    @staticmethod
    def of_process() -> PageMap:
        """One for all wires of a process (a forked child gets its own: the file shows whoever opened it)."""
        return _page_map_of(os.getpid())

    def num_private(self, address: int, nbytes: int) -> int:
        """0.03 us per page."""
        num_pages = -(-nbytes // PAGE)
        entries = os.pread(self._fd, num_pages * 8, address // PAGE * 8)
        if len(entries) != num_pages * 8:
            raise WireError("short read from /proc/self/pagemap")
        return entries[7::8].translate(self._IS_PRIVATE).count(1)


@functools.cache
def _page_map_of(pid: int) -> PageMap:
    return PageMap()


def can_see_private_pages() -> bool:
    """Whether this system tells which copy-on-write pages were written to (then views without a copy are safe)."""
    try:
        file = SharedFile.create("fsdp_core_probe")
        os.posix_fallocate(file.fd, 0, 2 * PAGE)
        probe = file.map(0, 2 * PAGE, private=True)
        pages = PageMap()
        before = (probe.buffer[0], pages.num_private(probe.address, 2 * PAGE))
        probe.buffer[PAGE] = b"\1"
        return before == (b"\0", 0) and pages.num_private(probe.address, 2 * PAGE) == 1
    except (OSError, WireError, ValueError):
        return False
