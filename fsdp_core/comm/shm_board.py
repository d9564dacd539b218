"""The notice board of a shared-memory wire: what each rank has entered and finished, and waiting for it.

One small shared segment, one page-aligned section per rank; a rank writes its own section only:

| word | bytes | meaning |
|---|---|---|
| ISSUED | u64 | collectives this rank has entered; entries below it can be read |
| CONSUMED | u64 | this rank will read no memory of a peer for any collective below it |
| STATE | u64 | running, closed (left on purpose) or failed (``reason`` says why) |
| reason | text | the error of a failed rank, so that its peers can repeat it |
| entries | ring | per collective an envelope (must agree) and where this rank's data lies (need not agree) |

Waiting: look at the word a few times, then sleep in the kernel on the word itself (futex) in short slices, so a
waiting rank costs no core, wakes within microseconds, still sees a peer that died, and lets Python handle signals.

Memory order: data is written, then ``fence``, then the word; a reader sees the word, then ``fence``, then reads data.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from fsdp_core.comm.envelope import ENVELOPE_BYTES, Envelope, mismatch_error
from fsdp_core.errors import EngineError, MismatchError, WireError

ENTRY_BYTES = 256
NUM_ENTRIES = 512
MAX_AHEAD = NUM_ENTRIES // 2  # a rank that is this many collectives ahead of a peer waits for it
_ENTRIES_AT = 4096
SECTION_BYTES = _ENTRIES_AT + NUM_ENTRIES * ENTRY_BYTES
_REASON_AT, _REASON_BYTES = 512, 3072
_PLACE = struct.Struct("<qqq")  # fields of Place
SPINS = 40
_SAY_ALL_S = 1.0  # how long an error about a mismatch waits for the ranks that have not come yet
_SLICE_S = 0.1  # longest sleep before looking for dead peers


class Word(IntEnum):
    """Index of a word in a section, in units of 8 bytes; each on a cache line of its own."""

    ISSUED = 0
    CONSUMED = 16
    STATE = 32


class RankState(IntEnum):
    RUNNING = 0
    CLOSED = 1
    FAILED = 2
    MISMATCHED = 3


@dataclass(frozen=True)
class Place:
    """Where a rank's data of one collective lies: a block of its home memory, and where in it the data starts."""

    offset: int = 0
    nbytes: int = 0
    start: int = 0


NOWHERE = Place()


class _Futex:
    """Sleep until a 32-bit word changes, across processes. Where the system call is unknown: sleep briefly."""

    _NUMBERS: ClassVar = {"x86_64": 202, "aarch64": 98, "riscv64": 98}

    def __init__(self) -> None:
        self._number = self._NUMBERS.get(platform.machine())
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall

    def wait(self, address: int, value: int, timeout_s: float) -> None:
        if self._number is None:
            time.sleep(min(timeout_s, 50e-6))
            return
        seconds = int(timeout_s)
        limit = (ctypes.c_long * 2)(seconds, int((timeout_s - seconds) * 1e9))
        self._syscall(self._number, ctypes.c_void_p(address), 0, ctypes.c_uint32(value), limit, None, 0)

    def wake(self, address: int) -> None:
        if self._number is not None:
            self._syscall(self._number, ctypes.c_void_p(address), 1, 0x7FFFFFFF, None, None, 0)


class Fence:
    """A full memory barrier: a lock's release followed by its acquire are ordered on every architecture we meet
    (on x86 each is a locked instruction; on ARM a store-release before a load-acquire of one word)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


def is_dead(pid: int) -> bool:
    """Whether a process has ended; also true of one that is not reaped yet, which signal 0 would call alive."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        return False  # a kernel without pidfds: the time limit will tell
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(fd)


class Board:
    """One rank's access to the board of its group.

    Args:
        memory: the shared segment, ``SECTION_BYTES`` per rank, zero-filled at first.
        ranks: global ranks in group order, for messages.
        group_rank: whose section this rank writes.
        pids: process ids in group order.
        timeout_s: how long to wait for one peer before giving up.
    """

    def __init__(
        self, memory: mmap.mmap, ranks: Sequence[int], group_rank: int, pids: Sequence[int], timeout_s: float
    ) -> None:
        self.ranks, self.group_rank = tuple(ranks), group_rank
        self._memory = memory
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._pids = tuple(pids)
        self._others = [peer for peer in range(len(self.ranks)) if peer != group_rank]
        self._timeout_s = timeout_s
        self._futex, self.fence = _Futex(), Fence()
        self._compared = [0] * len(self.ranks)  # per peer: entries compared so far
        self._failure: EngineError | None = None
        self._is_closed = False
        self.issued = 0

    # Entering a collective ------------------------------------------------------------------------------------------

    def issue(self, packed: bytes, place: Place = NOWHERE) -> int:
        """Tell the peers that this rank entered its next collective; return its sequence number.

        Everything written before (data included) is visible to whoever sees the entry.
        """
        self.check_usable()
        sequence = self.issued
        if sequence >= MAX_AHEAD:
            for peer in self._others:
                self.wait(peer, Word.ISSUED, sequence - MAX_AHEAD + 1)
        at = self._entry_at(self.group_rank, sequence)
        self._bytes[at : at + ENVELOPE_BYTES] = packed
        _PLACE.pack_into(self._bytes, at + ENVELOPE_BYTES, place.offset, place.nbytes, place.start)
        self.issued = sequence + 1
        self._publish(Word.ISSUED, self.issued)
        self.compare()
        return sequence

    def place(self, peer: int, sequence: int) -> Place:
        """Where ``peer``'s data of a collective lies; ``wait_issued`` must have returned for it."""
        return Place(*_PLACE.unpack_from(self._bytes, self._entry_at(peer, sequence) + ENVELOPE_BYTES))

    def consumed(self, below: int) -> None:
        """Tell the peers that this rank has finished reading for all collectives below ``below``."""
        self._publish(Word.CONSUMED, below)

    # Waiting --------------------------------------------------------------------------------------------------------

    def has(self, peer: int, word: Word, at_least: int) -> bool:
        return self._words[self._word_at(peer, word)] >= at_least

    def all_have(self, word: Word, at_least: int) -> bool:
        words = self._words
        for peer in self._others:
            if words[self._word_at(peer, word)] < at_least:
                return False
        self.fence()
        return True

    def wait_issued(self, sequence: int) -> None:
        """Return when all peers have entered collective ``sequence`` and it is the same one everywhere."""
        for peer in self._others:
            self.wait(peer, Word.ISSUED, sequence + 1)
        self.fence()
        self.compare()

    def wait_consumed(self, sequence: int) -> None:
        """Return when no peer will read this rank's memory for collective ``sequence`` any more."""
        for peer in self._others:
            self.wait(peer, Word.CONSUMED, sequence + 1)
        self.fence()

    def wait(self, peer: int, word: Word, at_least: int) -> None:
        index = self._word_at(peer, word)
        words = self._words
        for _ in range(SPINS):
            if words[index] >= at_least:
                return
        deadline = time.monotonic() + self._timeout_s
        address = self._address + index * 8  # low half first: all supported machines are little-endian
        while (value := words[index]) < at_least:
            self.compare()
            self._check_peers(peer, word, at_least, time.monotonic() > deadline)
            self._futex.wait(address, value & 0xFFFFFFFF, _SLICE_S)

    def compare(self) -> None:
        """Compare this rank's entries with every peer's, as far as both have come."""
        for peer in self._others:
            start, stop = self._compared[peer], min(self.issued, self._words[self._word_at(peer, Word.ISSUED)])
            if start >= stop:
                continue
            self.fence()
            for sequence in range(start, stop):
                mine, theirs = self._entry(self.group_rank, sequence), self._entry(peer, sequence)
                if mine != theirs:
                    self._fail_mismatch(sequence)
            self._compared[peer] = stop

    # Failing and leaving --------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise WireError("this wire is closed", remedy="build a new one")

    def fail(self, error: EngineError) -> EngineError:
        """Remember ``error``, tell the peers, and hand it back to be raised. The wire is of no more use."""
        if self._failure is None:
            self._failure = error
            state = RankState.MISMATCHED if isinstance(error, MismatchError) else RankState.FAILED
            self._leave(state, str(error))
        return self._failure

    def close(self) -> None:
        """Tell the peers that this rank left. Never waits."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._failure is None:
            self._leave(RankState.CLOSED, "")

    def _leave(self, state: RankState, reason: str) -> None:
        at = self.group_rank * SECTION_BYTES + _REASON_AT
        raw = reason.encode()[: _REASON_BYTES - 1]
        self._bytes[at : at + len(raw) + 1] = raw + b"\0"
        self._publish(Word.STATE, int(state))
        for word in (Word.ISSUED, Word.CONSUMED):
            self._futex.wake(self._address + self._word_at(self.group_rank, word) * 8)

    def _check_peers(self, waiting_for: int, word: Word, at_least: int, is_late: bool) -> None:
        """Raise when the wait is in vain: a peer failed, left or died, or the time is up.

        A peer's state is read first and its word after it: one that did its part and then left is no trouble.
        """
        for peer in self._others:
            state = self._words[self._word_at(peer, Word.STATE)]
            if state in (RankState.FAILED, RankState.MISMATCHED):
                raise self.fail(self._repeat(peer, RankState(state)))
            is_gone = state == RankState.RUNNING and is_dead(self._pids[peer])
            if is_gone and not self._has_come(peer, word, at_least):
                raise self.fail(self._missing(peer, at_least, "its process has died"))
        has_left = self._words[self._word_at(waiting_for, Word.STATE)] == RankState.CLOSED
        if has_left and not self._has_come(waiting_for, word, at_least):
            raise self.fail(self._missing(waiting_for, at_least, "it has closed its wire"))
        if is_late and not self._has_come(waiting_for, word, at_least):
            raise self.fail(self._missing(waiting_for, at_least, f"it did not come within {self._timeout_s:g} s"))

    def _has_come(self, peer: int, word: Word, at_least: int) -> bool:
        self.fence()
        return bool(self._words[self._word_at(peer, word)] >= at_least)

    def _repeat(self, peer: int, state: RankState) -> EngineError:
        at = peer * SECTION_BYTES + _REASON_AT
        reason = bytes(self._bytes[at : at + _REASON_BYTES]).split(b"\0", 1)[0].decode(errors="replace")
        kind = MismatchError if state == RankState.MISMATCHED else WireError
        return kind(f"rank {self.ranks[peer]} gave up this wire, so rank {self._me} does too. Its error was:\n{reason}")

    def _missing(self, peer: int, at_least: int, why: str) -> WireError:
        wanted = self._entry(self.group_rank, min(at_least, self.issued) - 1) if self.issued else None
        where = Envelope.unpack(wanted) if wanted else None
        theirs = self._words[self._word_at(peer, Word.ISSUED)]
        last = Envelope.unpack(self._entry(peer, theirs - 1)) if theirs else "nothing: it never used this wire"
        return WireError(
            f"rank {self._me} waited for rank {self.ranks[peer]} in vain: {why}",
            unit=(where.label.unit or None) if where else None,
            expected=f"rank {self.ranks[peer]} in {where}",
            got=f"the last collective rank {self.ranks[peer]} entered was {last}",
            remedy=f"look at the log of rank {self.ranks[peer]} for what stopped it there",
        )

    def _fail_mismatch(self, sequence: int) -> None:
        deadline = time.monotonic() + _SAY_ALL_S
        while time.monotonic() < deadline and any(self._may_come(peer, sequence) for peer in self._others):
            time.sleep(1e-3)  # ranks that are about to come make the error complete
        by_rank = {
            self.ranks[peer]: self._entry(peer, sequence)
            for peer in range(len(self.ranks))
            if self.has(peer, Word.ISSUED, sequence + 1)
        }
        raise self.fail(mismatch_error(by_rank, self._me))

    def _may_come(self, peer: int, sequence: int) -> bool:
        is_running = self._words[self._word_at(peer, Word.STATE)] == RankState.RUNNING
        return is_running and not self.has(peer, Word.ISSUED, sequence + 1)

    # Layout ---------------------------------------------------------------------------------------------------------

    @property
    def _me(self) -> int:
        return self.ranks[self.group_rank]

    @staticmethod
    def _word_at(peer: int, word: Word) -> int:
        return peer * (SECTION_BYTES // 8) + word

    @staticmethod
    def _entry_at(peer: int, sequence: int) -> int:
        return peer * SECTION_BYTES + _ENTRIES_AT + sequence % NUM_ENTRIES * ENTRY_BYTES

    def _entry(self, peer: int, sequence: int) -> bytes:
        at = self._entry_at(peer, sequence)
        return bytes(self._bytes[at : at + ENVELOPE_BYTES])

    def _publish(self, word: Word, value: int) -> None:
        index = self._word_at(self.group_rank, word)
        self.fence()
        self._words[index] = value
        self._futex.wake(self._address + index * 8)
