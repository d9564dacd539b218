"""How long a collective takes: rings, by bandwidth and latency (alpha-beta). Pure.

A ring of n ranks takes n - 1 steps, each of which sends 1/n of the tensor over every link; an all-reduce goes round
twice. A ring that spans hosts crosses each host's boundary once, so it runs at the rate of the *host's* network, and
all groups that have a ring through the host at the same time share that.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_core.simulate.hardware import Hardware

REDUCTIONS = frozenset({"reduce_scatter", "all_reduce"})
_TIMES_ROUND = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "all_to_all": 1}


@dataclass(frozen=True)
class Ring:
    """A group of ranks as the network sees it. num_sharing: groups like it that use a host's network at once."""

    num_ranks: int
    num_hosts: int
    num_sharing: int


def ring_of(ranks: tuple[int, ...], devices_per_host: int) -> Ring:
    """ranks: global numbers; a host has ``devices_per_host`` consecutive ones."""
    hosts: dict[int, int] = {}
    for rank in ranks:
        hosts[rank // devices_per_host] = hosts.get(rank // devices_per_host, 0) + 1
    on_one_host = max(hosts.values())
    return Ring(len(ranks), len(hosts), max(1, devices_per_host // on_one_host))


def collective_s(primitive: str, nbytes: int, ranks: tuple[int, ...], hardware: Hardware) -> float:
    """Seconds from the moment all ranks are there. nbytes: of the whole tensor."""
    ring = ring_of(ranks, hardware.devices_per_host)
    if ring.num_ranks == 1:
        return 0.0
    if primitive == "all_to_all":
        return _all_to_all_s(nbytes, ring, hardware)
    is_reduction = primitive in REDUCTIONS
    rate = hardware.intra_bytes_per_s * hardware.intra_efficiency * (hardware.intra_reduce_ratio if is_reduction else 1)
    num_cross_steps = 0
    if ring.num_hosts > 1:
        across = hardware.cross_bytes_per_s * hardware.cross_efficiency / ring.num_sharing
        rate = min(rate, across * (hardware.cross_reduce_ratio if is_reduction else 1))
        num_cross_steps = ring.num_hosts - 1
    num_intra_steps = ring.num_ranks - 1 - num_cross_steps
    latency = num_intra_steps * hardware.intra_step_s + num_cross_steps * hardware.cross_step_s
    per_round = nbytes * (ring.num_ranks - 1) / ring.num_ranks / rate + latency
    return _TIMES_ROUND[primitive] * per_round


def _all_to_all_s(nbytes: int, ring: Ring, hardware: Hardware) -> float:
    """Every rank sends 1/n to each: what is for another host shares the host's network with its other ranks."""
    on_host = ring.num_ranks // ring.num_hosts
    inside = nbytes * (on_host - 1) / ring.num_ranks / (hardware.intra_bytes_per_s * hardware.intra_efficiency)
    outside = nbytes * (ring.num_ranks - on_host) / ring.num_ranks * on_host * ring.num_sharing
    across = outside / (hardware.cross_bytes_per_s * hardware.cross_efficiency)
    step = hardware.cross_step_s if ring.num_hosts > 1 else hardware.intra_step_s
    return max(inside, across) + step


def sent_bytes(primitive: str, nbytes: int, num_ranks: int) -> float:
    """What one rank of a ring sends. nbytes: of the whole tensor."""
    return _TIMES_ROUND[primitive] * nbytes * (num_ranks - 1) / num_ranks


def cross_host_bytes(primitive: str, nbytes: int, ranks: tuple[int, ...], devices_per_host: int) -> tuple[float, float]:
    """What one rank sends to another host, in both conventions: averaged over the ranks of the ring that really
    crosses once per host boundary; and charged as if every hop of a ring crossed (as the paper's formulas do)."""
    ring = ring_of(ranks, devices_per_host)
    sent = sent_bytes(primitive, nbytes, ring.num_ranks)
    if ring.num_hosts == 1:
        return 0.0, 0.0
    if primitive == "all_to_all":  # no ring: what is for another host goes there, once
        crossing = nbytes * (ring.num_ranks - ring.num_ranks // ring.num_hosts) / ring.num_ranks
        return crossing, crossing
    return sent * ring.num_hosts / ring.num_ranks, sent
