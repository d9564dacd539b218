"""The wire on gloo's point-to-point messages: what gloo is fast at.

gloo's own all-gather and reduce-scatter take three to four times as long as sending the same bytes directly
(64 MB, 2 ranks, 2 cores: 60 and 75 ms against 18). Here every rank sends its part straight to every peer:

* all-gather: the shard to each peer, received in place;
* reduce-scatter: slice k to rank k, received slices summed in rank order, so the bits are the same on every run;
* all-reduce: small tensors whole to everybody, larger ones as reduce-scatter then all-gather of slices;
* broadcast: from the source to each peer.

Sends and receives start when the collective is issued and move on gloo's own thread; ``wait`` sums.

Labels: each message is preceded by its envelope, on a tag of its own so that it arrives whatever the peer does. The
data's tag is a digest of the envelope: data of unlike collectives never meets (gloo aborts the process when a
message is larger than its receiver), and ``wait`` compares envelopes before it waits for data. ``quiesce`` is an
envelope alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_core.comm.counting import HostLayout, even_spans
from fsdp_core.comm.envelope import ENVELOPE_BYTES, Envelope, mismatch_error, tag_of
from fsdp_core.comm.pieces import COMBINE, Combine, check_sizes, combine_into, part_of
from fsdp_core.comm.wire import Label, ReduceOp, Wire, WireCounter, Work
from fsdp_core.errors import EngineError, WireError

SMALL_BYTES = 64 << 10  # an all-reduce up to here sends everything to everybody: one round instead of two
_ENVELOPE_TAG = 0x7E57
_QUIESCE = Label(-1, "quiesce")
_SECOND_ROUND = 1 << 30  # flipped in the tag of an all-reduce's second half


class _Exchange(Work):
    """Messages on their way to and from the peers, and what to do once they have come."""

    def __init__(self, wire: GlooP2PWire, packed: bytes) -> None:
        self._wire, self.packed = wire, packed
        self._finish: Callable[[], None] | None = None
        self._envelopes: dict[int, tuple[Any, bytearray]] = {}  # peer -> its envelope on its way
        self._seen: dict[int, bytes] = {}  # peer -> its envelope
        self._receives: dict[int, Any] = {}
        self._sends: list[tuple[int, Any]] = []
        self._kept: list[Tensor] = []  # memory the messages use
        self._is_done = False

    def greet(self, peer: int, mine: Tensor) -> None:
        """Trade envelopes with ``peer``."""
        theirs = bytearray(ENVELOPE_BYTES)
        memory = torch.frombuffer(theirs, dtype=torch.uint8)
        self._kept += (mine, memory)
        self._envelopes[peer] = (self._start(self._wire.group.recv, memory, peer, _ENVELOPE_TAG), theirs)
        self._sends.append((peer, self._start(self._wire.group.send, mine, peer, _ENVELOPE_TAG)))

    def receive(self, peer: int, tensor: Tensor, tag: int) -> None:
        self._kept.append(tensor)
        self._receives[peer] = self._start(self._wire.group.recv, _as_bytes(tensor), peer, tag)

    def send(self, peer: int, tensor: Tensor, tag: int) -> None:
        self._kept.append(tensor)
        self._sends.append((peer, self._start(self._wire.group.send, _as_bytes(tensor), peer, tag)))

    def _start(self, function: Callable[..., Any], data: Tensor, peer: int, tag: int) -> Any:
        try:
            return function([data], peer, tag)
        except RuntimeError as error:
            raise self._wire.fail_missing(peer, error, self.packed) from error

    def then(self, finish: Callable[[], None]) -> None:
        """Run ``finish`` when everything has been received."""
        self._finish = finish

    def wait(self) -> None:
        if self._is_done:
            return
        self._wire.check_usable()
        for peer, (work, theirs) in self._envelopes.items():
            self._wire.await_message(work, peer, self.packed)
            self._seen[peer] = bytes(theirs)
            if self._seen[peer] != self.packed:
                raise self._wire.fail_mismatch(self.packed, self._all_envelopes())
        for peer, work in self._receives.items():
            self._wire.await_message(work, peer, self.packed)
        if self._finish is not None:
            self._finish()
        for peer, work in self._sends:
            self._wire.await_message(work, peer, self.packed)
        self._is_done = True
        self._kept.clear()
        self._finish = None

    def is_completed(self) -> bool:
        return self._is_done or all(
            work.is_completed()
            for work in (
                *(work for work, _ in self._envelopes.values()),
                *self._receives.values(),
                *(work for _, work in self._sends),
            )
        )

    def _all_envelopes(self) -> dict[int, bytes]:
        """Of all peers, waiting a moment for those still on their way: they make the error complete."""
        for peer, (work, theirs) in self._envelopes.items():
            if peer in self._seen:
                continue
            try:
                work.wait(timedelta(seconds=1))
            except RuntimeError:
                continue
            self._seen[peer] = bytes(theirs)
        return self._seen


class GlooP2PWire(Wire):
    """See the module's docstring.

    Args:
        group: a torch process group with the gloo backend for CPU, used by nobody else for point-to-point messages.
        ranks: its global ranks, in group order.
        ranks_per_host: declared host size, for counting bytes only.
        timeout: how long to wait for a peer.
    """

    name = "gloo_p2p"

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        *,
        ranks_per_host: int | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self.group, self._ranks = group, tuple(ranks)
        self.group_size, self.group_rank = len(self._ranks), dist.get_rank(group)
        self.counter = WireCounter()
        self._hosts = HostLayout(self._ranks, self.group_rank, ranks_per_host)
        self._peers = [peer for peer in range(self.group_size) if peer != self.group_rank]
        self._timeout = timeout
        self._sequence = 0
        self._scratch = _ScratchPool()
        self._failure: EngineError | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def scratch_bytes(self) -> int:
        """Memory kept for slices that peers send, between steps: their largest need."""
        return self._scratch.kept_bytes

    # Collectives ----------------------------------------------------------------------------------------------------

    def all_gather(self, full: Tensor, shard: Tensor, label: Label) -> Work:
        check_sizes("all_gather", full, shard, self.group_size, label)
        exchange, tag = self._begin("all_gather", label, shard.numel(), full.dtype)
        own = part_of(full, self.group_rank, self.group_size)
        own.copy_(shard)  # converts if it must; the shard itself is free from here on
        if own.numel():
            for peer in self._peers:
                exchange.receive(peer, part_of(full, peer, self.group_size), tag)
            for peer in self._peers:
                exchange.send(peer, own, tag)
        self._hosts.record(self.counter, "all_gather", own.numel() * own.element_size())
        return exchange

    def reduce_scatter(self, shard: Tensor, full: Tensor, label: Label, divisor: float = 1.0) -> Work:
        check_sizes("reduce_scatter", full, shard, self.group_size, label)
        parts = [part_of(full, rank, self.group_size) for rank in range(self.group_size)]
        exchange, tag = self._begin("reduce_scatter", label, shard.numel(), full.dtype)
        if shard.numel():
            self._trade_parts(exchange, tag, parts, shard, torch.add, divisor)
        self._hosts.record(self.counter, "reduce_scatter", shard.numel() * shard.element_size())
        return exchange

    def all_reduce(self, tensor: Tensor, label: Label, op: ReduceOp = "sum", divisor: float = 1.0) -> Work:
        flat = tensor.view(-1)
        if flat.numel() * flat.element_size() <= SMALL_BYTES:
            return self._all_reduce_small(flat, label, op, divisor)
        spans = even_spans(flat.numel(), self.group_size)
        parts = [flat[start:stop] for start, stop in spans]
        mine = parts[self.group_rank]
        exchange, tag = self._begin("all_reduce", label, flat.numel(), flat.dtype, op)
        self._trade_parts(exchange, tag, parts, mine, COMBINE[op], divisor)
        sent = [(part.numel() + mine.numel()) * flat.element_size() for part in parts]
        self._hosts.record(self.counter, "all_reduce", sent)
        return _Chain(exchange, lambda: self._gather_parts(parts, tag, exchange.packed))

    def broadcast(self, tensor: Tensor, src: int, label: Label) -> Work:
        flat = tensor.view(-1)
        exchange, tag = self._begin("broadcast", label, flat.numel(), flat.dtype, argument=src)
        if flat.numel() and self.group_rank == src:
            for peer in self._peers:
                exchange.send(peer, flat, tag)
        elif flat.numel():
            exchange.receive(src, flat, tag)
        is_source = self.group_rank == src
        self._hosts.record(self.counter, "broadcast", flat.numel() * flat.element_size() if is_source else 0)
        return exchange

    def quiesce(self) -> None:
        """Nothing of this rank is read after ``wait``. Envelopes are traded all the same: a rank that has come to its
        optimizer learns here that a peer is still in a collective which nobody else is in."""
        exchange, _ = self._begin("quiesce", _QUIESCE, 0, torch.uint8)
        exchange.wait()

    def close(self) -> None:
        if self._failure is None:
            self._failure = WireError("this wire is closed", remedy="build a new one")
        self._scratch.clear()

    # Parts of collectives -------------------------------------------------------------------------------------------

    def _begin(
        self, kind: str, label: Label, numel: int, dtype: torch.dtype, op: str = "sum", argument: int = 0
    ) -> tuple[_Exchange, int]:
        """Number the collective and trade envelopes with all peers; the exchange to add messages to, and their tag."""
        self.check_usable()
        packed = Envelope(self._sequence, kind, label, numel, dtype, op, argument).pack()
        self._sequence += 1
        exchange = _Exchange(self, packed)
        envelope = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        for peer in self._peers:
            exchange.greet(peer, envelope)
        return exchange, tag_of(packed)

    def _trade_parts(
        self,
        exchange: _Exchange,
        tag: int,
        parts: list[Tensor],
        target: Tensor,
        combine: Combine,
        divisor: float = 1.0,
    ) -> None:
        """Send part k to rank k; combine what comes for this rank, in rank order, into ``target``."""
        mine = parts[self.group_rank]
        scratch = self._scratch.take(len(self._peers), mine)
        sources = list(scratch)
        sources.insert(self.group_rank, mine)
        for peer, part in zip(self._peers, scratch, strict=True):
            exchange.receive(peer, part, tag)
        for peer in self._peers:
            exchange.send(peer, parts[peer], tag)

        def finish() -> None:
            combine_into([target], sources, combine, divisor)
            self._scratch.give(scratch)

        exchange.then(finish)

    def _all_reduce_small(self, flat: Tensor, label: Label, op: ReduceOp, divisor: float) -> Work:
        exchange, tag = self._begin("all_reduce", label, flat.numel(), flat.dtype, op)
        self._hosts.record(self.counter, "all_reduce", flat.numel() * flat.element_size())
        if flat.numel() == 0:
            return exchange
        mine = flat.clone()  # the sum is written to ``flat`` while ``mine`` may still be on its way
        self._trade_parts(exchange, tag, [mine] * self.group_size, flat, COMBINE[op], divisor)
        return exchange

    def _gather_parts(self, parts: list[Tensor], tag: int, packed: bytes) -> Work:
        """The second half of a large all-reduce: every rank's reduced part to everybody."""
        exchange = _Exchange(self, packed)
        for peer in self._peers:
            if parts[peer].numel():
                exchange.receive(peer, parts[peer], tag ^ _SECOND_ROUND)
        for peer in self._peers:
            if parts[self.group_rank].numel():
                exchange.send(peer, parts[self.group_rank], tag ^ _SECOND_ROUND)
        return exchange

    # Messages -------------------------------------------------------------------------------------------------------

    def await_message(self, work: Any, peer: int, packed: bytes) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise self.fail_missing(peer, error, packed) from error

    def check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure

    def fail_mismatch(self, packed: bytes, arrived: dict[int, bytes]) -> EngineError:
        by_rank = {self._ranks[peer]: envelope for peer, envelope in arrived.items()}
        me = self._ranks[self.group_rank]
        return self._fail(mismatch_error({**by_rank, me: packed}, me))

    def _fail(self, error: EngineError) -> EngineError:
        if self._failure is None:
            self._failure = error
        return error

    def fail_missing(self, peer: int, error: BaseException, packed: bytes) -> EngineError:
        where = Envelope.unpack(packed)
        me, them = self._ranks[self.group_rank], self._ranks[peer]
        return self._fail(
            WireError(
                f"rank {me} waited for rank {them} in vain",
                unit=where.label.unit or None,
                expected=f"rank {them} in {where} within {self._timeout.total_seconds():g} s",
                got=str(error).splitlines()[0][:300],
                remedy=f"look at the log of rank {them} for what stopped it there",
            )
        )


class _Chain(Work):
    """A second exchange that starts when the first is through."""

    def __init__(self, first: Work, then: Callable[[], Work]) -> None:
        self._first, self._then = first, then
        self._second: Work | None = None

    def wait(self) -> None:
        if self._second is None:
            self._first.wait()
            self._second = self._then()
        self._second.wait()

    def is_completed(self) -> bool:
        return self._second is not None and self._second.is_completed()


class _ScratchPool:
    """Memory for received slices, reused: fresh pages would cost more than the sums."""

    KEEP = 3  # blocks; one reduction is waited for while one or two younger ones are on their way

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, count: int, like: Tensor) -> list[Tensor]:
        """``count`` tensors of the size and dtype of ``like``."""
        nbytes = like.numel() * like.element_size()
        fitting = [block for block in self._free if block.numel() >= count * nbytes]
        if fitting:
            memory = min(fitting, key=Tensor.numel)
            self._free = [block for block in self._free if block is not memory]
        else:
            with torch.inference_mode(False):
                memory = torch.empty(count * nbytes, dtype=torch.uint8)
        return [memory[index * nbytes : (index + 1) * nbytes].view(like.dtype) for index in range(count)]

    def give(self, tensors: list[Tensor]) -> None:
        """Take back what ``take`` returned; of more than ``KEEP`` blocks the largest stay."""
        if tensors:
            self._free.append(torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage()))
            self._free = sorted(self._free, key=Tensor.numel)[-self.KEEP :]

    @property
    def kept_bytes(self) -> int:
        return sum(block.nbytes for block in self._free)

    def clear(self) -> None:
        self._free.clear()


def _as_bytes(tensor: Tensor) -> Tensor:
    """gloo moves bytes; so every dtype can travel."""
    return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
