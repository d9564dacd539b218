"""Which ranks share a host, as declared, and the bytes a primitive sends to each of them. Integers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_core.comm.wire import WireCounter


@dataclass(frozen=True)
class HostLayout:
    """The ranks of one group and the declared host size.

    ranks: global ranks, in group order.
    group_rank: this rank's index in ``ranks``.
    ranks_per_host: hosts hold this many consecutive global ranks; ``None``: everything is one host.
    """

    ranks: tuple[int, ...]
    group_rank: int
    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_host is not None and self.ranks_per_host < 1:
            raise ValueError(f"ranks_per_host must be at least 1 or None, got {self.ranks_per_host}")

    def is_intra_host(self, peer: int) -> bool:
        """Whether group rank ``peer`` is declared to be on this rank's host."""
        if self.ranks_per_host is None:
            return True
        return self.ranks[peer] // self.ranks_per_host == self.ranks[self.group_rank] // self.ranks_per_host

    def record(self, counter: WireCounter, primitive: str, bytes_to_peer: Sequence[int] | int) -> None:
        """Count one call of ``primitive``: bytes per group rank (own entry ignored), or the same for each peer."""
        intra = cross = 0
        for peer in range(len(self.ranks)):
            if peer == self.group_rank:
                continue
            nbytes = bytes_to_peer if isinstance(bytes_to_peer, int) else bytes_to_peer[peer]
            if self.is_intra_host(peer):
                intra += nbytes
            else:
                cross += nbytes
        counter.record(primitive, intra, cross)


@dataclass(frozen=True)
class SentBytes:
    """What left this rank by one primitive, to ranks declared to be on its host and to others."""

    num_calls: int
    intra_host_bytes: int
    cross_host_bytes: int

    @property
    def nbytes(self) -> int:
        return self.intra_host_bytes + self.cross_host_bytes


def total_sent(counters: Iterable[WireCounter]) -> dict[str, SentBytes]:
    """The sum over several wires, by primitive."""
    total: dict[str, SentBytes] = {}
    for counter in counters:
        for primitive, num_calls in counter.num_calls.items():
            before = total.get(primitive, SentBytes(0, 0, 0))
            total[primitive] = SentBytes(
                before.num_calls + num_calls,
                before.intra_host_bytes + counter.intra_host_bytes[primitive],
                before.cross_host_bytes + counter.cross_host_bytes[primitive],
            )
    return total


def even_spans(numel: int, parts: int) -> list[tuple[int, int]]:
    """Half-open spans that cut ``numel`` elements into ``parts`` pieces whose sizes differ by at most one."""
    size, rest = divmod(numel, parts)
    spans, start = [], 0
    for part in range(parts):
        stop = start + size + (part < rest)
        spans.append((start, stop))
        start = stop
    return spans
