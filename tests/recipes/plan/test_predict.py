"""Plans of tiny models: sums that must hold, and what must follow from a change of the config."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_core.simulate import tape as t
from recipes.plan.machine import machine_of
from recipes.plan.predict import plan, predict
from recipes.plan.record import record_run
from recipes.plan.result import KINDS
from recipes.plan.table import text_of
from tests.recipes.plan.configs_in_tests import profile, tiny


def test_state_is_what_arithmetic_says() -> None:
    """float32 parameters, gradients and two Adam states, a 4th of each unit (padded) on a rank."""
    found = plan(tiny("gpt"), 4, 4)
    recorded = record_run(tiny("gpt"), 4, 4)
    shards = 4 * sum(flat.shard_numel for unit in recorded.report.units for flat in unit.flat_parameters)
    assert found.memory.at_peak["parameters"] == shards
    assert found.memory.peak_by_kind["gradients"] == pytest.approx(shards, abs=64)  # and a few scalars
    num_flat = sum(len(unit.flat_parameters) for unit in recorded.report.units)
    assert found.memory.peak_by_kind["optimizer"] == pytest.approx(2 * shards, abs=8 * num_flat + 64)  # step counts


def test_the_parts_add_up() -> None:
    found = plan(tiny("gpt"), 4, 2)
    assert set(found.memory.at_peak) <= set(KINDS)
    # the allocator rounds to 512 bytes and may hand out blocks that are up to 1 MiB too large
    assert sum(found.memory.at_peak.values()) <= found.memory.allocated
    times = found.time
    assert times.forward_s + times.backward_s + times.optimizer_s == pytest.approx(times.step_s)
    assert times.compute_s + times.exposed_s + times.idle_s == pytest.approx(times.step_s)
    assert sum(row.nbytes for row in found.traffic.rows) == pytest.approx(
        found.traffic.intra_host + found.traffic.cross_host, abs=len(found.traffic.rows) + 2
    )


def test_gathers_of_full_sharding_send_the_model_twice_and_reduce_it_once() -> None:
    recorded = record_run(tiny("gpt", train__activation_checkpointing=True), 4, 4)
    found = predict(tiny("gpt", train__activation_checkpointing=True), recorded, machine_of(profile(), 4)).plan
    units = recorded.report.units
    root = 4 * sum(flat.padded_numel for flat in units[0].flat_parameters)
    blocks = 4 * sum(flat.padded_numel for unit in units[1:] for flat in unit.flat_parameters)
    last = 4 * sum(flat.padded_numel for flat in units[-1].flat_parameters)
    rows = {(row.primitive, row.phase): row for row in found.traffic.rows}
    # the root and the last block stay gathered between forward and backward
    assert rows["all_gather", "forward"].nbytes == (root + blocks) * 3 // 4
    assert rows["all_gather", "backward"].nbytes == (blocks - last) * 3 // 4
    assert rows["reduce_scatter", "reduce"].nbytes == (root + blocks) * 3 // 4


def test_pooled_buffers_do_not_grow_once_they_have_met_every_unit() -> None:
    """The third step may still find a buffer of a small unit where it wants a large one; later ones may not."""
    recorded = record_run(tiny("gpt", sharding__gather_buffers="pooled"), 4, 4, steps=4)
    engines = [
        (index, entry.what)
        for index, entry in enumerate(recorded.tape.entries)
        if isinstance(entry, t.Alloc) and entry.what.startswith("engine.")
    ]
    assert {"engine.full", "engine.grad_full"} <= {what for _, what in engines}
    assert [what for index, what in engines if index >= recorded.last_step] == []


def test_every_step_leaves_what_it_found() -> None:
    """But for a few scalars, which live until the next step has made its own."""
    recorded = record_run(tiny("gpt", sharding__gather_buffers="allocator", train__micro_batch=1), 2, 2)
    tape, change = recorded.tape, 0
    sizes = {entry.block: entry.nbytes for entry in (*tape.held, *tape.entries) if isinstance(entry, t.Alloc)}
    for entry in tape.entries[recorded.last_step :]:
        if isinstance(entry, t.Alloc):
            change += sizes[entry.block]
        elif isinstance(entry, t.Free):
            change -= sizes[entry.block]
    assert abs(change) < 100


def test_a_run_that_retries_or_does_not_fit_has_no_rates() -> None:
    config = tiny("gpt", sharding__gather_buffers="allocator")
    recorded = record_run(config, 2, 2)
    plenty = predict(config, recorded, machine_of(profile(), 2)).plan
    assert plenty.rates is not None
    assert plenty.fits
    small = replace(profile(), usable_memory_bytes=plenty.memory.allocated // 2)
    refused = predict(config, recorded, machine_of(small, 2)).plan
    assert not refused.fits
    assert refused.rates is None
    assert [one.is_blocking for one in refused.advice] == [True]  # and none that speaks of the step's time
    assert "sharding.gather_buffers=pooled" in refused.advice[0].change


def test_a_profile_that_knows_too_little_is_named() -> None:
    with pytest.raises(ValueError, match=r"'unknown' does not know hardware.peak_flops_float32, hardware.memory_bytes"):
        machine_of(profile("unknown"), 2)


@pytest.mark.parametrize("kind", ["gpt", "t5"])
def test_the_tape_counts_the_flops_of_the_models_formula(kind: str) -> None:
    config = tiny(kind)
    recorded = record_run(config, 2, 2)
    counted = sum(
        kernel.flops for kernel in recorded.tape.entries[recorded.last_step :] if isinstance(kernel, t.Kernel)
    )
    found = predict(config, recorded, machine_of(profile(), 2)).plan
    assert found.rates is not None
    told = found.rates.tflops_per_rank * 1e12 * found.time.step_s  # type: ignore[operator]
    assert counted == pytest.approx(told, rel=0.02)


@pytest.mark.parametrize(("kernels", "accesses"), [("fused", 7), ("explicit", 19)])
def test_what_an_update_moves_depends_on_its_kernels(kernels: str, accesses: int) -> None:
    """Elements of a rank's shards that AdamW reads and writes, all float32; small kernels beside them are scalars."""
    recorded = record_run(tiny("gpt", optimizer__kernels=kernels), 2, 2)
    entries = recorded.tape.entries[recorded.last_step :]
    (begins,) = [i for i, one in enumerate(entries) if isinstance(one, t.Mark) and one.kind == "phase"][-2:-1]
    names = {"_fused_adamw_", "lerp_", "mul_", "addcmul_", "sqrt", "div", "add_", "addcdiv_"}
    moved = sum(one.nbytes for one in entries[begins:] if isinstance(one, t.Kernel) and one.name in names)
    assert moved == pytest.approx(4 * accesses * recorded.num_parameters / 2, rel=0.01)


def sources_alive(gather_buffers: str, is_inline: bool) -> int:
    """Most unsharded gradients that the engine holds at once, in host order."""
    changes = {"sharding__gather_buffers": gather_buffers, "model__num_layers": 6}
    recorded = record_run(tiny("gpt", **changes), 4, 4, is_inline=is_inline)
    live: set[int] = set()
    most = 0
    for entry in recorded.tape.entries[recorded.last_step :]:
        if isinstance(entry, t.Alloc) and entry.what == "engine.grad_full":
            live.add(entry.block)
        elif isinstance(entry, t.Free):
            live.discard(entry.block)
        most = max(most, len(live))
    return most


def test_a_source_from_the_allocator_goes_back_when_its_reduction_is_issued() -> None:
    """Where the device lags; a device that does not would have to wait for the reduction."""
    assert sources_alive("allocator", is_inline=False) == 1
    assert sources_alive("allocator", is_inline=True) == 2


def test_weights_kept_in_bfloat16_halve_the_state() -> None:
    precision = {"precision__param_dtype": "bfloat16", "precision__reduce_dtype": "bfloat16"}
    fine = plan(tiny("gpt", **precision), 4, 4).memory
    coarse = plan(tiny("gpt", precision__master_dtype="bfloat16", **precision), 4, 4).memory
    for kind in ("parameters", "gradients", "optimizer"):
        assert coarse.peak_by_kind[kind] == pytest.approx(fine.peak_by_kind[kind] / 2, rel=0.02), kind
    assert coarse.peak_by_kind["gathered"] == fine.peak_by_kind["gathered"]


def test_a_plan_of_another_engine_says_so() -> None:
    own = plan(tiny("gpt"), 2, 2)
    other = plan(tiny("gpt", plan__gradients="concatenated", plan__frees_gradients=True), 2, 2)
    assert (own.habits, other.habits) == ((), ("plan.gradients=concatenated", "plan.frees_gradients=true"))
    assert "not of this engine" not in text_of(own)
    assert "not of this engine, by plan.gradients=concatenated, plan.frees_gradients=true" in text_of(other)
