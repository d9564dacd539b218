"""The wire: the one seam between the engine and its transport.

A wire carries the collectives of ONE group of ranks (a sharding group or a replication group). The engine
holds one per group and never names ``torch.distributed`` itself. All tensors are 1-D, contiguous, on the
wire's device; ``F`` is the group's size, ``r`` this rank's index in it (0 <= r < F).

Memory. A wire may want to own the memory it sends from (shared memory does): the engine asks it for every
flat shard and every flat gradient buffer through ``empty(numel, dtype, role)``, and calls ``quiesce()``
before anybody may overwrite a source that a peer could still be reading. Wires that copy on send return plain
memory, and their ``quiesce`` only compares what the ranks have called. Collectives must also accept memory they
did not allocate. Wire memory cannot be resized (``storage.resize_(0)`` raises): drop the tensor instead.

Who may write what, and when (peers may read this rank's memory while it computes):

* ``SHARD`` memory: only between ``quiesce()`` and this rank's next ``all_gather`` on the wire (the first
  gather after a quiesce says "all my shards are final"; peers then read them at any time, without asking,
  until they have returned from the next ``quiesce()``). One quiesce at the end of backward, and one at the
  end of a root forward that no backward will follow, is the whole price.
* ``GRAD_FULL`` memory: from its ``reduce_scatter`` until that ``Work.wait()`` has returned it is the wire's.
  A wire may do the sum only in ``wait()`` of this or a later collective: call ``wait`` late (with one or two
  younger reductions issued after it) and ranks hardly ever wait for each other.
* Memory the wire did not allocate may be written as soon as ``Work.wait()`` has returned.
* ``SHARD`` memory is asked for in the same order and sizes on all ranks of the group; other roles need not be.

Completion. Each collective returns a ``Work``. ``wait()`` makes the result usable by the *caller*: on CPU it
blocks; on CUDA it orders the current stream behind the collective. A wire may finish before it returns.

Averages. Reductions take a divisor, since the wire has the sums in its cache when it writes them: a division
afterwards would read and write the whole gradient once more.

Identity. Every collective carries a ``Label`` (which unit, which phase), which every wire compares between the
ranks: with each message and at ``quiesce``, or (``collectives``) at ``quiesce`` and, on gloo, before each collective.
Where peers disagree all ranks raise ``MismatchError``.

Counting. ``bytes_sent(...)`` are recorded where they are sent, per primitive, into ``counter``.
"""

from __future__ import annotations

import abc
import enum
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

ReduceOp = Literal["sum", "max", "min"]


class BufferRole(enum.Enum):
    """What the engine wants memory for."""

    SHARD = "shard"  # source of all-gathers, lives as long as the model
    FULL = "full"  # target of an all-gather
    GRAD_FULL = "grad_full"  # source of a reduce-scatter, one unit's unsharded gradient
    GRAD_SHARD = "grad_shard"  # target of a reduce-scatter, source of an all-reduce


@dataclass(frozen=True)
class Label:
    """Who is talking: compared between ranks, printed in errors and traces."""

    unit_id: int  # same on all ranks; -1 for collectives that belong to no unit
    phase: str  # "forward" | "backward" | "reduce" | "replicate" | "norm" | "state" | ...
    unit: str = ""  # the unit's name, for messages


class Work(abc.ABC):
    """A collective on its way."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Return when the caller may use the result (CPU: blocks; CUDA: current stream waits)."""

    @abc.abstractmethod
    def is_completed(self) -> bool:
        """True when ``wait`` would not block."""


class DoneWork(Work):
    """A collective that had finished when it returned."""

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


@dataclass
class WireCounter:
    """Bytes that left this rank, by primitive, and by whether they crossed to another host."""

    num_calls: dict[str, int] = field(default_factory=dict)
    intra_host_bytes: dict[str, int] = field(default_factory=dict)
    cross_host_bytes: dict[str, int] = field(default_factory=dict)

    def record(self, primitive: str, intra_host_bytes: int, cross_host_bytes: int) -> None:
        self.num_calls[primitive] = self.num_calls.get(primitive, 0) + 1
        self.intra_host_bytes[primitive] = self.intra_host_bytes.get(primitive, 0) + intra_host_bytes
        self.cross_host_bytes[primitive] = self.cross_host_bytes.get(primitive, 0) + cross_host_bytes

    def reset(self) -> None:
        self.num_calls.clear()
        self.intra_host_bytes.clear()
        self.cross_host_bytes.clear()


class Wire(abc.ABC):
    """Collectives of one group of ranks. See the module's docstring for the contract."""

    name: str  # "collectives" | "gloo_p2p" | "shared_memory"
    group_size: int  # F
    group_rank: int  # r
    counter: WireCounter

    def empty(self, numel: int, dtype: torch.dtype, role: BufferRole) -> Tensor:
        """Uninitialised 1-D memory that this wire likes for ``role``. May raise ``WireError`` (no space)."""
        with torch.inference_mode(False):  # memory outlives the mode it was first needed in
            return torch.empty(numel, dtype=dtype, device=self.device)

    @property
    @abc.abstractmethod
    def device(self) -> torch.device: ...

    @abc.abstractmethod
    def all_gather(self, full: Tensor, shard: Tensor, label: Label) -> Work:
        """``full[k*s:(k+1)*s] = shard of rank k`` for all k; ``full`` has F*s elements, ``shard`` s.

        ``shard`` may be ``full[r*s:(r+1)*s]`` itself (in place). The dtypes may differ: values are converted
        to ``full.dtype`` (as ``Tensor.to`` rounds), before they are sent or while they are copied, whichever
        is cheaper on this wire. Passing the full-precision shard is how mixed precision should gather.
        """

    @abc.abstractmethod
    def reduce_scatter(self, shard: Tensor, full: Tensor, label: Label, divisor: float = 1.0) -> Work:
        """``shard = (sum over ranks k of full_k[r*s:(r+1)*s]) / divisor``; ``full`` may be used as scratch.

        The sum has the same bits on every run (a fixed order of ranks) on CPU wires.
        ``shard`` may be ``full[r*s:(r+1)*s]`` itself (in place).
        """

    @abc.abstractmethod
    def all_reduce(self, tensor: Tensor, label: Label, op: ReduceOp = "sum", divisor: float = 1.0) -> Work:
        """In place, same bits on every rank; the result is divided by ``divisor`` (floating-point sums only)."""

    @abc.abstractmethod
    def broadcast(self, tensor: Tensor, src: int, label: Label) -> Work:
        """From group rank ``src``, in place."""

    def full_view(self, shard: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
        """The gathered form of ``shard`` without a copy, where this wire has one; else ``None``.

        ``shard`` is ``SHARD`` memory of this wire. The result (F*s elements; the same tensor each time) is passed
        as ``full`` to ``all_gather``, which then only synchronises. It behaves like a private buffer: a write to
        it is seen by this rank alone and lasts until the next ``all_gather`` into it, which restores the gathered
        values. In the shard's dtype it costs no memory until written to; in another ``dtype`` the group keeps one
        converted copy (s elements per rank), made once per write window instead of once per gather.
        All ranks of the group ask for the same views in the same order, as for ``SHARD`` memory.
        """
        return None

    def quiesce(self) -> None:
        """Return when no peer can still be reading memory of this rank. Called by every rank of the group
        at the same points (before the optimizer may write, before memory is released)."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Release what the wire holds. Idempotent; never blocks on a dead peer."""
