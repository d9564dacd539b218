"""What a figure shows of a plan: one number (or a yes or no) by name, with its unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recipes.plan.result import Plan

Value = float | bool


@dataclass(frozen=True)
class Measure:
    """of: None where a plan tells no such number (no speed with retries). digits: behind the point, in tables."""

    unit: str
    digits: int
    of: Callable[[Plan], Value | None] | None  # None: not of a plan, but of one collective (``collectives``)
    is_flag: bool = False


def _hardware_tflops(plan: Plan) -> float | None:
    return None if plan.rates is None else plan.rates.hardware_tflops_per_rank


def _qps(plan: Plan) -> float | None:
    return None if plan.rates is None else plan.rates.qps_per_rank


def _step_s(plan: Plan) -> float | None:
    return None if plan.rates is None else plan.time.step_s


def _backward_share(plan: Plan) -> float | None:
    return None if plan.rates is None else 100 * plan.time.backward_s / plan.time.step_s


MEASURES: dict[str, Measure] = {
    "hardware_tflops": Measure("TFLOPS", 1, _hardware_tflops),
    "qps": Measure("samples/s/GPU", 0, _qps),
    "step_s": Measure("s", 2, _step_s),
    "backward_share": Measure("% of the step", 1, _backward_share),
    "allocated": Measure("GB allocated", 1, lambda plan: plan.memory.allocated / 1e9),
    "active": Measure("GB active", 1, lambda plan: plan.memory.active / 1e9),
    "reserved": Measure("GB reserved", 1, lambda plan: plan.memory.reserved / 1e9),
    "has_retries": Measure("retries", 0, lambda plan: plan.has_retries or not plan.fits, is_flag=True),
    "fits": Measure("fits", 0, lambda plan: plan.fits, is_flag=True),
    "all_gather_ms": Measure("ms", 2, None),
}
