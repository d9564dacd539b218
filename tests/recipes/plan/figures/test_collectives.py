"""An all-gather in numbers that can be checked by hand, and figure 2b against the paper."""

from __future__ import annotations

import pytest

from fsdp_core.simulate.hardware import Hardware
from recipes.plan.figures.collectives import all_gathers_ms
from recipes.plan.figures.points import Gathers

HARDWARE = Hardware(
    half_flops_per_s=1.0,
    single_flops_per_s=1.0,
    memory_bytes_per_s=1e3,
    usable_bytes=1,
    devices_per_host=2,
    intra_bytes_per_s=1e9,
    cross_bytes_per_s=100.0,
    memory_efficiency=0.5,
    cross_efficiency=1.0,
    intra_step_s=1.0,
    cross_step_s=1.0,
)


def test_calls_pay_their_latency_each() -> None:
    # 4 ranks on 2 hosts: 3 steps of 1 s, and 3/4 of 400 bytes over the network at 100 bytes/s
    assert all_gathers_ms(Gathers(100, 1, False), 4, HARDWARE) == pytest.approx(1e3 * (3 + 3))
    assert all_gathers_ms(Gathers(100, 10, False), 4, HARDWARE) == pytest.approx(1e3 * (30 + 3))


def test_a_list_is_copied_once_more() -> None:
    into_one = all_gathers_ms(Gathers(100, 1, False), 4, HARDWARE)
    assert all_gathers_ms(Gathers(100, 1, True), 4, HARDWARE) - into_one == pytest.approx(1e3 * 2 * 400 / 500)
