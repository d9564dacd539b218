"""What is made of measured times: fits that must give back what they were made from, and a file that can be read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from fsdp_core.simulate.timeline import kernel_s
from recipes.calibrate import links, profile, units
from recipes.calibrate.links import MOST_SLOWDOWN, Line, Timed
from recipes.calibrate.profile import Value
from recipes.data.records import DataInfo
from recipes.plan.machine import machine_of
from recipes.plan.samples import expected_info
from tests.recipes.plan.configs_in_tests import profile as hardware_of
from tests.recipes.plan.configs_in_tests import tiny


def times(line: Line, num_ranks: int) -> list[Timed]:
    sizes = [
        (primitive, nbytes)
        for primitive in ("all_gather", "reduce_scatter", "all_reduce")
        for nbytes in (4096, 1 << 20, 1 << 24)
    ]
    return [
        Timed(primitive, nbytes, line.seconds(Timed(primitive, nbytes, 0.0), num_ranks)) for primitive, nbytes in sizes
    ]


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_the_fit_finds_the_line_that_the_times_lie_on(num_ranks: int) -> None:
    line = links.fitted(times(Line(5e-6, 3e9), num_ranks), num_ranks)
    assert (line.step_s, line.bytes_per_s, line.reduce_ratio) == pytest.approx((5e-6, 3e9, 1.0), rel=1e-6)
    slow_to_add = links.fitted(times(Line(1e-5, 4e10, 0.3), num_ranks), num_ranks)
    assert (slow_to_add.step_s, slow_to_add.bytes_per_s) == pytest.approx((1e-5, 4e10), rel=1e-6)
    assert slow_to_add.reduce_ratio == pytest.approx(0.3, rel=1e-6)


def test_a_fit_is_as_often_too_fast_as_too_slow() -> None:
    """What two ranks on shared memory took; a fit by relative errors told 186 and 372 us of the last two."""
    sizes = (4096, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
    found_us = {
        "all_gather": (13.9, 13.5, 20.6, 43.9, 140.0),
        "reduce_scatter": (16.7, 17.4, 33.2, 91.1, 382.5),
        "all_reduce": (27.9, 25.6, 52.5, 134.4, 1322.1),
    }
    found = [
        Timed(primitive, nbytes, 1e-6 * one)
        for primitive, each in found_us.items()
        for nbytes, one in zip(sizes, each, strict=True)
    ]
    line = links.fitted(found, 2)
    ratios = {(one.primitive, one.nbytes): line.seconds(one, 2) / one.seconds for one in found}
    assert all(0.5 < ratio < 1.5 for ratio in ratios.values())
    assert ratios["reduce_scatter", 1 << 24] == pytest.approx(0.94, abs=0.02)
    assert sum(math.log(ratio) for ratio in ratios.values()) == pytest.approx(0.0, abs=1e-9)


def test_a_gather_that_measured_as_nothing_says_nothing() -> None:
    line = times(Line(1e-5, 4e10, 0.3), 2)
    nothing = Timed("all_gather", 65536, links.SHORTEST_S)
    assert links.fitted([*line, nothing], 2) == links.fitted(line, 2)


def test_no_latency_and_no_rate_is_below_nothing() -> None:
    falling = [Timed("all_gather", 4096, 1e-5), Timed("all_gather", 1 << 24, 1e-6)]
    line = links.fitted(falling, 2)
    assert line.step_s > 0
    assert line.bytes_per_s > 0
    without_latency = [Timed("all_gather", 4096, 1.1e-7), Timed("all_gather", 1 << 20, 1e-3)]
    assert links.fitted(without_latency, 2).step_s == 0


def test_steps_between_hosts_are_what_the_steps_inside_leave_over() -> None:
    """8 ranks on 2 hosts: 7 steps of a ring, one of them between hosts."""
    assert links.cross_step_s(Line(9e-6, 1e9), Line(3e-6, 1e10), 8, 2) == pytest.approx(7 * 9e-6 - 6 * 3e-6)
    assert links.cross_step_s(Line(9e-6, 1e9), None, 4, 4) == pytest.approx(9e-6)


@pytest.mark.parametrize(
    ("both_s", "slowdown"), [(2.0, 0.0), (2.5, 1.0), (3.0, MOST_SLOWDOWN), (3.5, MOST_SLOWDOWN), (1.8, 0.0)]
)
def test_slowdown_of_computing_beside_a_collective(both_s: float, slowdown: float) -> None:
    """One second of talking, two of computing."""
    assert links.slowdown_of(1.0, 2.0, both_s) == pytest.approx(slowdown)


@pytest.mark.parametrize("kind", ["gpt", "t5", "deepvit", "regnet", "dhen"])
def test_units_are_recorded_with_the_inputs_they_have_in_the_model(kind: str) -> None:
    config = tiny(kind)
    found = units.kinds_of(config, info_of(config), 2)
    assert found
    assert all(one.kernels and one.count >= 1 for one in found)
    assert sum(kernel.flops for kernel in found[0].kernels) > 0
    assert units.input_bytes(found[0]) > 0


def info_of(config: object) -> DataInfo:
    return expected_info(config)  # type: ignore[arg-type]


def test_the_efficiency_makes_the_simulation_as_long_as_the_measurement() -> None:
    kinds = units.kinds_of(tiny("gpt", train__global_batch=64), expected_info(tiny("gpt")), 2)
    hardware = machine_of(hardware_of(), 2).hardware
    slow = hardware.__class__(**{**vars(hardware), "single_flops_per_s": 1e9, "kernel_s": 0.0})

    def simulated(kernel: object, efficiency: float) -> float:
        return kernel_s(kernel, slow.__class__(**{**vars(slow), "compute_efficiency": efficiency}))  # type: ignore[arg-type]

    wanted = sum(simulated(kernel, 0.37) for kernel in kinds[0].kernels)
    assert units.efficiency_of(kinds[:1], [wanted], simulated) == pytest.approx(0.37, rel=1e-6)
    assert units.efficiency_of(kinds[:1], [1e-12], simulated) == 1.0


def test_the_profile_is_read_back_as_it_was_measured(tmp_path: Path) -> None:
    values = [
        Value("name", "here"),
        Value("peak_flops_float32", 123456789012.3, "torch.mm"),
        Value("launch_s", 4.56e-06),
        Value("memory_bytes", 17_179_869_184),
        Value("compute_efficiency", 0.5),
        Value("cross_host_bytes_per_s", None, "no link"),
    ]
    path = profile.write(tmp_path, "here", profile.yaml_of(values, "A machine, measured.", tmp_path, "here"))
    assert path == tmp_path / "hardware" / "here.yaml"
    assert yaml.safe_load(path.read_text()) == {
        "name": "here",
        "peak_flops_float32": pytest.approx(1.2346e11, rel=1e-3),
        "launch_s": 4.56e-06,
        "memory_bytes": 17_179_869_184,
        "compute_efficiency": 0.5,
        "cross_host_bytes_per_s": None,
    }
