"""Which jobs share a plan of memory, and that a plan of fewer micro-batches has the same peak."""

from __future__ import annotations

import pytest

from recipes.plan.fitting import Fitting, memory_key, shortened
from recipes.plan.machine import machine_for_memory, machine_of
from recipes.plan.predict import predict
from recipes.plan.record import record_run
from recipes.schema import RecipeConfig
from recipes.schema.training import HardwareConfig
from tests.recipes.plan.configs_in_tests import profile, tiny


def key(**changes: object) -> str:
    return memory_key(tiny("gpt", **changes), 2, 2)


def test_what_memory_does_not_see_shares_a_plan() -> None:
    own = key(train__global_batch=8, train__micro_batch=1)
    assert own == key(train__global_batch=8, train__micro_batch=1, optimizer__lr=1e-5, optimizer__weight_decay=0.1)
    assert own == key(train__global_batch=8, train__micro_batch=1, run__seed=7, train__steps=9)
    assert own == key(train__global_batch=64, train__micro_batch=1)  # more than three micro-batches either way
    assert key(train__global_batch=4, train__micro_batch=2) == key(train__global_batch=4)


def test_whether_a_run_fits_does_not_depend_on_habits_that_plans_assume_of_others() -> None:
    habits = {"plan__gradients": "concatenated", "plan__frees_gradients": True, "plan__packs_state": True}
    assert key() == key(**habits)
    assert Fitting().of(tiny("gpt"), 2, 2) == Fitting().of(tiny("gpt", **habits), 2, 2)
    assert needed(tiny("gpt")) != needed(tiny("gpt", **habits))


@pytest.mark.parametrize(
    "change",
    [
        {"train__micro_batch": 2},
        {"train__global_batch": 2},
        {"train__activation_checkpointing": True},
        {"sharding__reshard_after_forward": False},
        {"precision__param_dtype": "bfloat16"},
        {"hardware": profile("h200")},
        {"model__num_layers": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_memory_sees_does_not(change: dict[str, object]) -> None:
    assert key(train__global_batch=8, train__micro_batch=1) != key(
        **{"train__global_batch": 8, "train__micro_batch": 1, **change}
    )


@pytest.mark.parametrize("communicates", [False, True])
def test_three_micro_batches_have_the_peak_of_five(communicates: bool) -> None:
    config = tiny(
        "gpt", train__global_batch=10, train__micro_batch=1, train__accumulate_with_communication=communicates
    )
    short = shortened(config, 2)
    assert short.train.global_batch == 6
    peaks = [needed(one) for one in (config, short)]
    assert peaks[0] == peaks[1]


def needed(config: RecipeConfig) -> tuple[int, int, int]:
    memory = predict(config, record_run(config, 2, 2), machine_of(config.hardware, 2)).plan.memory
    return memory.allocated, memory.active, memory.needed


def test_a_fit_says_how_much_is_needed_and_what_to_change() -> None:
    small = HardwareConfig(name="small", usable_memory_bytes=200_000)
    config = tiny("gpt", hardware=small)
    fit = Fitting().of(config, 2, 2)
    assert not fit.does
    assert fit.needed > fit.usable == 200_000
    assert "train.activation_checkpointing=true" in fit.change
    assert Fitting().of(tiny("gpt"), 2, 2).does


def test_each_memory_is_planned_once() -> None:
    asked: list[int] = []
    fitting = Fitting(lambda: asked.append(1) or "")  # type: ignore[func-returns-value]
    first = fitting.of(tiny("gpt"), 2, 2)
    num_asked = len(asked)
    assert num_asked > 0
    assert fitting.of(tiny("gpt", optimizer__lr=1e-5), 2, 2) is first
    assert len(asked) == num_asked


def test_what_cannot_be_planned_is_not_known_to_fit_or_not() -> None:
    assert "train.compile" in Fitting().of(tiny("gpt", train__compile=True), 2, 2).unknown
    assert Fitting(lambda: "no time").of(tiny("gpt"), 2, 2).unknown == "no time"


def test_memory_that_is_not_known_has_no_end() -> None:
    machine = machine_for_memory(HardwareConfig(), 2)
    assert machine.hardware.usable_bytes > 10**18
    assert machine_for_memory(HardwareConfig(memory_bytes=100), 2).hardware.usable_bytes == 94
