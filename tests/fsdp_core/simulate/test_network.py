"""Rings by hand: bandwidth, latency, hosts, and the two ways to count what crosses between hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_core.simulate.hardware import Hardware
from fsdp_core.simulate.network import collective_s, cross_host_bytes, ring_of

HARDWARE = Hardware(
    half_flops_per_s=1e12,
    single_flops_per_s=1e12,
    memory_bytes_per_s=1e12,
    usable_bytes=10**9,
    devices_per_host=4,
    intra_bytes_per_s=100.0,
    cross_bytes_per_s=80.0,
    intra_efficiency=0.5,
    cross_efficiency=0.25,
    intra_step_s=1.0,
    cross_step_s=10.0,
)


def test_inside_a_host_each_of_the_steps_sends_one_part_at_the_inner_rate() -> None:
    # 3 steps of 1 s, and 3/4 of 400 bytes at 50 bytes/s
    assert collective_s("all_gather", 400, (0, 1, 2, 3), HARDWARE) == pytest.approx(3 * 1.0 + 300 / 50)


def test_a_ring_over_hosts_runs_at_the_hosts_network_rate_and_pays_its_latency_once_per_host() -> None:
    # 8 ranks on 2 hosts: 7 steps, one of them between hosts; 7/8 of 800 bytes at 20 bytes/s
    assert collective_s("reduce_scatter", 800, tuple(range(8)), HARDWARE) == pytest.approx(6 * 1.0 + 10.0 + 700 / 20)


def test_what_adds_may_be_slower_than_what_copies() -> None:
    slow = replace(HARDWARE, intra_reduce_ratio=0.5, cross_reduce_ratio=0.1)
    everyone = tuple(range(8))
    for primitive in ("all_gather", "broadcast"):
        assert collective_s(primitive, 800, everyone, slow) == collective_s(primitive, 800, everyone, HARDWARE)
    assert collective_s("reduce_scatter", 400, (0, 1, 2, 3), slow) == pytest.approx(3 * 1.0 + 300 / 25)
    assert collective_s("all_reduce", 800, everyone, slow) == pytest.approx(2 * (6 * 1.0 + 10.0 + 700 / 2))


def test_groups_that_cross_at_the_same_time_share_the_hosts_network() -> None:
    column = (0, 4)  # one rank of each host: four such groups at once
    assert ring_of(column, 4).num_sharing == 4
    assert collective_s("all_gather", 80, column, HARDWARE) == pytest.approx(10.0 + 40 / 5)


def test_an_all_reduce_goes_round_twice() -> None:
    once = collective_s("reduce_scatter", 400, (0, 1, 2, 3), HARDWARE)
    assert collective_s("all_reduce", 400, (0, 1, 2, 3), HARDWARE) == pytest.approx(2 * once)


def test_a_group_of_one_takes_no_time() -> None:
    assert collective_s("all_gather", 10**9, (5,), HARDWARE) == 0.0


def test_hosts_are_consecutive_ranks() -> None:
    ring = ring_of((2, 3, 4, 5), 4)
    assert (ring.num_ranks, ring.num_hosts, ring.num_sharing) == (4, 2, 2)


@pytest.mark.parametrize(
    ("ranks", "crossing", "by_hop"),
    [((0, 1, 2, 3), 0.0, 0.0), (tuple(range(8)), 700 * 2 / 8, 700.0), ((0, 4), 400.0, 400.0)],
    ids=["one host", "two hosts", "one rank of each host"],
)
def test_what_crosses_to_another_host(ranks: tuple[int, ...], crossing: float, by_hop: float) -> None:
    """A ring crosses each host's boundary once; the paper's formulas charge every hop."""
    assert cross_host_bytes("all_gather", 800, ranks, 4) == pytest.approx((crossing, by_hop))


def test_full_sharding_of_m_bytes_moves_three_m_over_every_host_boundary() -> None:
    """Two gathers and a reduce-scatter, as the paper has it: 3 M (W - 1) / W a host."""
    ranks, nbytes = tuple(range(16)), 1600
    per_rank = sum(
        cross_host_bytes(primitive, nbytes, ranks, 4)[0] for primitive in ("all_gather", "all_gather", "reduce_scatter")
    )
    assert 4 * per_rank == pytest.approx(3 * nbytes * 15 / 16)
