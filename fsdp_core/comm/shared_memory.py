"""The wire inside one host on CPU: ranks read each other's memory instead of sending it.

* ``SHARD`` memory of all ranks of a unit lies side by side in one file, so a gather is one copy, or none at all
  (``full_view``). No rank is asked: the first gather after ``quiesce`` waits until every rank has come to it,
  which says that its optimizer is done; the following ones read at once. ``quiesce`` waits until every rank is
  done reading. Two waits a step, however many units there are.
* ``GRAD_FULL`` memory is read by its peers where it lies. A reduction is announced when it is issued and summed
  when all ranks have announced theirs: at the next call into the wire, or in ``wait``. Ranks that drift apart by
  less than the number of reductions left pending never wait for each other.
* Memory from elsewhere is copied into shared memory first.
* Every call carries an envelope (``comm/envelope.py``) that is compared with the peers' as soon as both exist, and
  at the latest in the next call that waits; so a mismatch is an error on all ranks before ``quiesce`` returns.

Order of reading and writing is kept by two counters per rank (``comm/shm_board.py``).
"""

from __future__ import annotations

import mmap
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_core.comm.counting import HostLayout, even_spans
from fsdp_core.comm.envelope import Envelope
from fsdp_core.comm.pieces import COMBINE, check_sizes, combine_into, part_of
from fsdp_core.comm.rendezvous import Rendezvous
from fsdp_core.comm.shm_board import NOWHERE, SECTION_BYTES, Board, Place, Word
from fsdp_core.comm.shm_memory import (
    Home,
    PageMap,
    PeerHome,
    PrivateView,
    ShardFile,
    ShardSlot,
    SharedFile,
    available_bytes,
    can_see_private_pages,
)
from fsdp_core.comm.wire import BufferRole, DoneWork, Label, ReduceOp, Wire, WireCounter, Work
from fsdp_core.errors import WireError

SMALL_BYTES = 32 << 10  # an all-reduce up to here is summed whole by every rank
_QUIESCE = Label(-1, "quiesce")


class _Reduction(Work):
    """A collective that was announced and runs once all ranks have announced it."""

    def __init__(
        self,
        wire: SharedMemoryWire,
        sequence: int,
        execute: Callable[[], None],
        finish: Callable[[], None] | None,
        waits_for_readers: bool,
    ) -> None:
        self._wire, self.sequence = wire, sequence
        self._execute: Callable[[], None] | None = execute
        self._finish = finish
        self._waits_for_readers = waits_for_readers
        self.is_executed = False

    def execute(self) -> None:
        assert self._execute is not None
        self._execute()
        self._execute = None  # lets go of the source
        self.is_executed = True

    def wait(self) -> None:
        self._wire._drain(self.sequence)
        if self._waits_for_readers:
            self._wire._board.wait_consumed(self.sequence)
            self._wire._let_go()
        if self._finish is not None:
            self._finish()
            self._finish = None

    def is_completed(self) -> bool:
        self._wire._progress()
        return self.is_executed and (
            not self._waits_for_readers or self._wire._board.all_have(Word.CONSUMED, self.sequence + 1)
        )


class SharedMemoryWire(Wire):
    """See the module's docstring. Building it is collective over the group; all ranks raise if any cannot.

    Args:
        rendezvous: the group, and how its ranks exchange a few bytes while this is set up.
        ranks_per_host: declared host size, for counting bytes only.
        timeout: how long to wait for a peer.
        expected_bytes: memory this rank will ask for in all; refused now if it is not there.
    """

    name = "shared_memory"

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        ranks_per_host: int | None = None,
        timeout: timedelta = timedelta(minutes=10),
        expected_bytes: int = 0,
    ) -> None:
        self.group_size, self.group_rank = len(rendezvous.ranks), rendezvous.group_rank
        self.counter = WireCounter()
        self._hosts = HostLayout(rendezvous.ranks, self.group_rank, ranks_per_host)
        self._timeout_s = timeout.total_seconds()
        self._set_up(rendezvous, expected_bytes)
        self._pending: deque[_Reduction] = deque()
        self._held: deque[tuple[int, Tensor]] = deque()  # (sequence, memory that peers read until they consumed it)
        self._views: weakref.WeakSet[PrivateView] = weakref.WeakSet()
        self._is_open = False  # shards are final and being read; between quiesce and the next gather they are not

    def _set_up(self, rendezvous: Rendezvous, expected_bytes: int) -> None:
        """Create this rank's files, open the peers', and agree on whether everybody could."""
        files: list[SharedFile] = []
        problem = ""
        try:
            files = _create_files(self.group_size if self.group_rank == 0 else 0)
        except WireError as error:
            problem = str(error)
        me = {
            "pid": os.getpid(),
            "host": _host_identity(),
            "fds": [file.fd for file in files],
            "expected": expected_bytes,
            "problem": problem,
        }
        records = rendezvous.exchange(me)
        problem = _problem_of(records, rendezvous.ranks)
        if not problem:
            try:
                self._open(records, files, rendezvous.ranks)
            except WireError as error:
                problem = str(error)
        outcome = {"problem": problem, "views": not problem and can_see_private_pages()}
        outcomes = rendezvous.exchange(outcome)
        problem = next((record["problem"] for record in outcomes if record["problem"]), "")
        if problem:
            raise WireError("this group cannot use shared memory", got=problem, remedy="use wire='gloo_p2p'")
        self._pages = PageMap.of_process() if all(record["views"] for record in outcomes) else None
        self._board_file.close()  # mapped everywhere by now

    def _open(self, records: list[dict[str, Any]], files: list[SharedFile], ranks: tuple[int, ...]) -> None:
        first = records[0]
        if self.group_rank == 0:
            self._board_file, shards = files[1:3]
        else:
            self._board_file, shards = (SharedFile.of_process(first["pid"], fd) for fd in first["fds"][1:3])
        self._home = Home(files[0])
        self._peer_homes = {
            peer: PeerHome(SharedFile.of_process(record["pid"], record["fds"][0]))
            for peer, record in enumerate(records)
            if peer != self.group_rank
        }
        self._shards = ShardFile(shards, self.group_size, self.group_rank)
        memory = mmap.mmap(self._board_file.fd, self.group_size * SECTION_BYTES)
        self._board = Board(memory, ranks, self.group_rank, [record["pid"] for record in records], self._timeout_s)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    # Memory ---------------------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype, role: BufferRole) -> Tensor:
        try:
            with torch.inference_mode(False):  # memory outlives the mode it was first needed in
                if role is BufferRole.SHARD:
                    return self._shards.empty(numel, dtype)
                if role is BufferRole.FULL:
                    return torch.empty(numel, dtype=dtype)
                return self._home.empty(numel, dtype)
        except WireError as error:
            raise self._board.fail(error) from None

    def full_view(self, shard: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
        slot = self._shards.slot_of(shard)
        if slot is None or self._pages is None:
            return None
        try:
            with torch.inference_mode(False):
                view = self._shards.view_of(slot, dtype or slot.dtype)
        except WireError as error:
            raise self._board.fail(error) from None
        if view not in self._views:
            self._views.add(view)
            slot.is_paired = slot.is_paired and not view.is_converted  # peers must have converted theirs, too
        return view.tensor

    # Collectives ----------------------------------------------------------------------------------------------------

    def all_gather(self, full: Tensor, shard: Tensor, label: Label) -> Work:
        check_sizes("all_gather", full, shard, self.group_size, label)
        slot = self._shards.slot_of(shard)
        ordinal = -1 if slot is None else slot.ordinal
        envelope = Envelope(self._board.issued, "all_gather", label, shard.numel(), full.dtype, argument=ordinal)
        if slot is None:
            self._gather_staged(full, shard, envelope)
        else:
            self._gather_slot(full, slot, envelope)
        self._hosts.record(self.counter, "all_gather", shard.numel() * full.element_size())
        return DoneWork()

    def _gather_slot(self, full: Tensor, slot: ShardSlot, envelope: Envelope) -> None:
        must_meet = not (self._is_open and slot.is_paired)
        if must_meet:
            self._drain()
            for each in self._views:
                each.refresh()
        sequence = self._board.issue(envelope.pack())
        if must_meet:
            self._board.wait_issued(sequence)
            self._is_open = slot.is_paired = True
            self._consume()
        else:
            self._progress()
        view = slot.views.get(full.dtype)
        if view is not None and view.tensor.data_ptr() == full.data_ptr():
            assert self._pages is not None
            view.restore(self._pages)
        else:
            full.copy_(slot.whole)

    def _gather_staged(self, full: Tensor, shard: Tensor, envelope: Envelope) -> None:
        self._drain()
        own = part_of(full, self.group_rank, self.group_size)
        own.copy_(shard)
        sequence = self._board.issue(envelope.pack(), self._stage(own))
        self._board.wait_issued(sequence)
        for peer, home in self._peer_homes.items():
            place = self._board.place(peer, sequence)
            part_of(full, peer, self.group_size).copy_(home.tensor(place, full.dtype, shard.numel()))
        self._consume()

    def reduce_scatter(self, shard: Tensor, full: Tensor, label: Label, divisor: float = 1.0) -> Work:
        check_sizes("reduce_scatter", full, shard, self.group_size, label)
        place, _ = self._offer(full)
        envelope = Envelope(self._board.issued, "reduce_scatter", label, shard.numel(), full.dtype)
        sequence = self._board.issue(envelope.pack(), place)
        start = self.group_rank * shard.numel()

        def execute() -> None:
            combine_into([shard], self._sources(full, sequence, start, shard.numel()), torch.add, divisor)

        self._hosts.record(self.counter, "reduce_scatter", shard.numel() * full.element_size())
        return self._enqueue(_Reduction(self, sequence, execute, None, waits_for_readers=True))

    def all_reduce(self, tensor: Tensor, label: Label, op: ReduceOp = "sum", divisor: float = 1.0) -> Work:
        tensor = tensor.view(-1)
        is_small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
        place, offered = self._offer(tensor, always_copy=is_small)
        envelope = Envelope(self._board.issued, "all_reduce", label, tensor.numel(), tensor.dtype, op)
        sequence = self._board.issue(envelope.pack(), place)
        combine = COMBINE[op]
        finish: Callable[[], None] | None = None
        if is_small:
            sent = [tensor.numel()] * self.group_size

            def execute() -> None:
                combine_into([tensor], self._sources(offered, sequence, 0, tensor.numel()), combine, divisor)

        else:
            spans = even_spans(tensor.numel(), self.group_size)
            start, stop = spans[self.group_rank]
            sent = [(span[1] - span[0]) + (stop - start) for span in spans]

            def execute() -> None:
                sources = self._sources(offered, sequence, start, stop - start)
                combine_into(sources, sources, combine, divisor)  # into everybody's copy

            if offered is not tensor:

                def finish() -> None:
                    tensor.copy_(offered)

        self._hosts.record(self.counter, "all_reduce", [numel * tensor.element_size() for numel in sent])
        return self._enqueue(_Reduction(self, sequence, execute, finish, waits_for_readers=not is_small))

    def broadcast(self, tensor: Tensor, src: int, label: Label) -> Work:
        tensor = tensor.view(-1)
        is_source = self.group_rank == src
        envelope = Envelope(self._board.issued, "broadcast", label, tensor.numel(), tensor.dtype, argument=src)
        sequence = self._board.issue(envelope.pack(), self._stage(tensor) if is_source else NOWHERE)

        def execute() -> None:
            if not is_source:
                place = self._board.place(src, sequence)
                tensor.copy_(self._peer_homes[src].tensor(place, tensor.dtype, tensor.numel()))

        self._hosts.record(self.counter, "broadcast", tensor.numel() * tensor.element_size() if is_source else 0)
        return self._enqueue(_Reduction(self, sequence, execute, None, waits_for_readers=False))

    def quiesce(self) -> None:
        sequence = self._board.issue(Envelope(self._board.issued, "quiesce", _QUIESCE).pack())
        self._drain()
        self._board.wait_issued(sequence)
        self._board.consumed(sequence + 1)
        self._board.wait_consumed(sequence)
        self._held.clear()
        self._is_open = False
        for view in self._views:
            view.expire()

    def close(self) -> None:
        self._board.close()
        self._pending.clear()
        self._held.clear()
        for home in self._peer_homes.values():
            home.close()
        self._shards.close()
        self._home.file.close()

    # Reductions on their way ----------------------------------------------------------------------------------------

    def _enqueue(self, work: _Reduction) -> Work:
        self._pending.append(work)
        self._progress()
        return work

    def _progress(self) -> None:
        """Run the pending reductions that every rank has announced. Never waits."""
        while self._pending and self._board.all_have(Word.ISSUED, self._pending[0].sequence + 1):
            self._board.compare()
            self._execute_first()

    def _drain(self, sequence: int | None = None) -> None:
        """Run the pending reductions up to ``sequence`` (all of them), waiting for the ranks that are late.

        Called before anything else that waits, since peers may be waiting for these.
        """
        while self._pending and (sequence is None or self._pending[0].sequence <= sequence):
            self._board.wait_issued(self._pending[0].sequence)
            self._execute_first()

    def _execute_first(self) -> None:
        work = self._pending.popleft()
        try:
            work.execute()
        except Exception as error:  # the peers would wait for this rank: tell them
            raise self._board.fail(WireError(f"a collective failed on this rank: {error}")) from error
        self._consume()

    def _consume(self) -> None:
        """Tell the peers how far this rank has read."""
        self._board.consumed(self._pending[0].sequence if self._pending else self._board.issued)
        self._let_go()

    def _let_go(self) -> None:
        while self._held and self._board.all_have(Word.CONSUMED, self._held[0][0] + 1):
            self._held.popleft()

    # Sources --------------------------------------------------------------------------------------------------------

    def _offer(self, tensor: Tensor, *, always_copy: bool = False) -> tuple[Place, Tensor]:
        """Where peers read ``tensor`` in the next collective: in place if it is ours to share, else a copy."""
        place = None if always_copy else self._home.find(tensor)
        if place is not None:
            self._held.append((self._board.issued, tensor))
            return place, tensor
        place = self._stage(tensor)
        return place, self._held[-1][1] if tensor.numel() else tensor

    def _stage(self, tensor: Tensor) -> Place:
        """Copy ``tensor`` to memory that peers can read in the next collective."""
        self._board.check_usable()
        if tensor.numel() == 0:
            return NOWHERE
        try:
            with torch.inference_mode(False):
                copy = self._home.empty(tensor.numel(), tensor.dtype)
        except WireError as error:
            raise self._board.fail(error) from None
        copy.copy_(tensor)
        self._held.append((self._board.issued, copy))
        place = self._home.find(copy)
        assert place is not None
        return place

    def _sources(self, own: Tensor, sequence: int, start: int, numel: int) -> list[Tensor]:
        """Elements ``[start, start + numel)`` of every rank's tensor, in group order."""
        sources = []
        for rank in range(self.group_size):
            if rank == self.group_rank:
                sources.append(own[start : start + numel])
            else:
                place = self._board.place(rank, sequence)
                sources.append(self._peer_homes[rank].tensor(place, own.dtype, numel, start))
        return sources


def _create_files(group_size: int) -> list[SharedFile]:
    """This rank's home; with a ``group_size`` (on the group's first rank) also the board and the file of shards."""
    files = [SharedFile.create("fsdp_core_home")]
    if group_size:
        files += [SharedFile.create("fsdp_core_board"), SharedFile.create("fsdp_core_shards")]
        files[1].reserve(0, group_size * SECTION_BYTES)
    return files


def _host_identity() -> str:
    """Equal for processes that can open each other's files through /proc: same boot, same process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError as error:
        return f"{socket.gethostname()} without /proc ({error})"


def _problem_of(records: list[dict[str, Any]], ranks: tuple[int, ...]) -> str:
    """Why these ranks cannot share memory; empty when they can."""
    for rank, record in zip(ranks, records, strict=True):
        if record["problem"]:
            return f"rank {rank}: {record['problem']}"
    hosts = {record["host"]: rank for rank, record in zip(ranks, records, strict=True)}
    if len(hosts) > 1:
        where = ", ".join(f"rank {rank} on {host.split(' ')[0]}" for host, rank in hosts.items())
        return f"ranks are on different hosts or in different process namespaces: {where}"
    wanted = sum(record["expected"] for record in records)
    if wanted > available_bytes():
        return f"not enough memory: {wanted} bytes wanted, {available_bytes()} available"
    return ""
