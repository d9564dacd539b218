"""Bytes on the wires in one step, inside hosts and between them, in both conventions."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_core.simulate.network import cross_host_bytes, sent_bytes
from fsdp_core.simulate.tape import Collective
from recipes.plan.result import TrafficPlan, TrafficRow


def traffic_of(collectives: Sequence[Collective], ranks_per_host: int) -> TrafficPlan:
    """collectives: of one step."""
    calls: dict[tuple[str, str], int] = {}
    sent: dict[tuple[str, str], float] = {}
    intra = cross = by_hop = 0.0
    for one in collectives:
        key = (one.primitive, one.phase)
        nbytes = sent_bytes(one.primitive, one.nbytes, len(one.ranks))
        calls[key] = calls.get(key, 0) + 1
        sent[key] = sent.get(key, 0.0) + nbytes
        crossing, charged = cross_host_bytes(one.primitive, one.nbytes, one.ranks, ranks_per_host)
        intra += nbytes - crossing
        cross += crossing
        by_hop += charged
    rows = tuple(TrafficRow(*key, calls[key], round(sent[key])) for key in sorted(calls))
    return TrafficPlan(rows, round(intra), round(cross), round(by_hop), round(cross * ranks_per_host))
