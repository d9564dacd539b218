"""Buffers for gathered parameters and unsharded gradients: pooled (few, reused) or from the allocator each time.

A buffer is handed over by an event: whoever acquires it waits, on its own stream, until the previous user's work
on it is done. A buffer whose storage somebody else still uses (a tensor saved by autograd, a view a user kept) is
not reused: it is left to whoever kept it, or taken back at a later acquire once they let go.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

from fsdp_core.comm.streams import HAPPENED, Event, Streams
from fsdp_core.comm.wire import BufferRole, Wire

T = TypeVar("T")
_storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count  # the count behind torch.Storage


class Buffer:
    """1-D memory with the views that its users made of it, kept so that the next use need not make them again."""

    __slots__ = ("_idle_count", "_storage", "_views", "memory", "ready", "tensor", "view_refs")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.tensor = memory  # the first elements of ``memory``, as many as the present user asked for
        self.ready: Event = HAPPENED  # the previous user's last work
        self._storage = memory.untyped_storage()
        self._views: dict[Hashable, object] = {}
        self.view_refs = 0  # Python references to ``memory`` that come from ``_views``: a view holds its base
        self._idle_count = _storage_use_count(self._storage._cdata)

    @property
    def capacity(self) -> int:
        return self.memory.numel()

    def narrow(self, numel: int) -> None:
        """Make ``tensor`` the first ``numel`` elements."""
        if self.tensor.numel() != numel:
            self.tensor = self.cached(("narrow", numel), lambda memory: memory.narrow(0, 0, numel))

    def cached(self, key: Hashable, make: Callable[[Tensor], T]) -> T:
        """``make(memory)``, remembered under ``key``; the views it makes do not count as foreign uses."""
        found = self._views.get(key)
        if found is None:
            uses, refs = _storage_use_count(self._storage._cdata), sys.getrefcount(self.memory)
            found = self._views[key] = make(self.memory)
            self._idle_count += _storage_use_count(self._storage._cdata) - uses
            self.view_refs += sys.getrefcount(self.memory) - refs
        return found  # type: ignore[return-value]

    def is_used_elsewhere(self) -> bool:
        return _storage_use_count(self._storage._cdata) > self._idle_count


class BufferPool:
    """The memory of one root. ``pooled`` reuses; otherwise every acquire asks the allocator anew."""

    def __init__(self, streams: Streams, pooled: bool) -> None:
        self._streams = streams
        self.is_pooled = pooled
        self._free: dict[tuple[int, BufferRole, torch.dtype], list[Buffer]] = {}
        self.num_live: dict[BufferRole, int] = {}
        self.peak_live: dict[BufferRole, int] = {}
        self.live_bytes = 0
        self.peak_live_bytes = 0

    def acquire(self, wire: Wire, numel: int, dtype: torch.dtype, role: BufferRole) -> Buffer:
        """Uninitialised memory; the current stream is ordered behind its previous user."""
        key = (id(wire), role, dtype)
        buffer = self._best_fit(self._free.get(key), numel)
        if buffer is None:
            with torch.inference_mode(False):  # memory outlives the mode it was first needed in
                buffer = Buffer(wire.empty(numel, dtype, role))
        buffer.narrow(numel)
        self._count(role, 1, numel * dtype.itemsize)  # not before: there may have been no memory
        self._streams.wait(buffer.ready)
        return buffer

    def release(self, wire: Wire, buffer: Buffer, role: BufferRole) -> None:
        """Give back; the caller's current stream holds the last use."""
        self._count(role, -1, -buffer.tensor.nbytes)
        if not self.is_pooled:
            self._streams.keep_for_current(buffer.memory)
            return
        buffer.ready = self._streams.record()
        self._free.setdefault((id(wire), role, buffer.memory.dtype), []).append(buffer)

    def _best_fit(self, free: list[Buffer] | None, numel: int) -> Buffer | None:
        """The smallest free buffer that is large enough and unused; one too small or kept by others makes way."""
        if not free:
            return None
        best, small = None, None
        for index, buffer in enumerate(free):
            if buffer.is_used_elsewhere():
                continue
            if buffer.capacity < numel:
                small = index
            elif best is None or buffer.capacity < free[best].capacity:
                best = index
        if best is not None:
            return free.pop(best)
        if small is not None:  # growing one buffer keeps their number at what is in flight
            del free[small]
        else:  # all are kept by others: forget the oldest, its keepers free it
            self._streams.keep_for_current(free.pop(0).memory)
        return None

    def _count(self, role: BufferRole, change: int, nbytes: int) -> None:
        self.num_live[role] = live = self.num_live.get(role, 0) + change
        self.live_bytes += nbytes
        if change > 0:
            self.peak_live[role] = max(self.peak_live.get(role, 0), live)
            self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
