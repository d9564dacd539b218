"""The tape: what one rank's host asks of its device during a step, in the order it asks. Plain records, no torch.

The engine itself writes it (``recording``): the same hooks, wires and limiter as in a real run, on tensors without
memory. ``timeline`` and ``allocator`` replay it against a hardware profile. Streams are small integers; blocks and
events are numbered in the order they are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

COMPUTE, GATHER, REDUCE = 0, 1, 2
STREAMS = {COMPUTE: "compute", GATHER: "gather", REDUCE: "reduce"}


@dataclass(frozen=True, slots=True)
class Alloc:
    """Memory is taken from the allocator's pool of ``stream``. nbytes: as the tensor's storage asks for them."""

    block: int
    nbytes: int
    stream: int
    what: str  # the operation that made it, or its role in the engine: engine.shard, engine.full, ... (``BufferRole``)


@dataclass(frozen=True, slots=True)
class Free:
    """The host lets go of the block: the allocator may hand it out again as soon as its streams are through."""

    block: int


@dataclass(frozen=True, slots=True)
class UsedOn:
    """``record_stream``: a stream that did not allocate the block works on it."""

    block: int
    stream: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operation on the device.

    flops: of matrix products, 0 for everything else (two per multiply-add).
    nbytes: read and written.
    is_half: its matrix products run in a 16-bit dtype.
    """

    name: str
    stream: int
    flops: float
    nbytes: int
    is_half: bool


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective: it starts when ``stream`` has got there and its channel is free; ``event`` is its end.

    primitive: all_gather, reduce_scatter, all_reduce, broadcast, all_to_all.
    nbytes: of the whole (gathered, or not yet reduced) tensor; of what one rank sends to all in an all_to_all.
    ranks: members in group order, as global ranks.
    """

    primitive: str
    stream: int
    event: int
    nbytes: int
    ranks: tuple[int, ...]
    unit: str
    phase: str


@dataclass(frozen=True, slots=True)
class Record:
    """An event behind what is on the stream."""

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The stream waits for the event; the host goes on."""

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host waits for the event (the rate limiter)."""

    event: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A row of the engine's event log, or of whoever drives the step (``step``, ``optimizer``)."""

    kind: str
    unit: str
    phase: str


Entry = Alloc | Free | UsedOn | Kernel | Collective | Record | Wait | HostWait | Mark


@dataclass
class Tape:
    """Entries in host order. held: blocks that were alive when the tape began."""

    entries: list[Entry] = field(default_factory=list)
    held: list[Alloc] = field(default_factory=list)

    def collectives(self) -> list[Collective]:
        return [entry for entry in self.entries if isinstance(entry, Collective)]

    def kernels(self) -> list[Kernel]:
        return [entry for entry in self.entries if isinstance(entry, Kernel)]

    def peak_bytes(self) -> int:
        """Most bytes that blocks held at once, in host order: what an allocator without rounding and streams needs."""
        size = {alloc.block: alloc.nbytes for alloc in self.held}
        live = peak = sum(size.values())
        for entry in self.entries:
            if isinstance(entry, Alloc):
                size[entry.block] = entry.nbytes
                live += entry.nbytes
                peak = max(peak, live)
            elif isinstance(entry, Free):
                live -= size.pop(entry.block)
        return peak
