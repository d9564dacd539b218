"""``plan``: from a config and a hardware profile to an answer. Start reading here.

record (the engine's schedule, once for a config) -> play (when) -> replay (memory) -> a ``Plan``
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_core.simulate import tape as t
from fsdp_core.simulate.allocator import MemoryReport, replay
from fsdp_core.simulate.timeline import Timeline, play
from recipes.metrics.flops import flop_rates, peak_flops, sample_flops
from recipes.plan.advice import advice_for
from recipes.plan.kinds import bytes_by_kind, kinds_of
from recipes.plan.machine import Machine, machine_of
from recipes.plan.record import RecordedRun, habits_in_words, record_run
from recipes.plan.result import MemoryPlan, Plan, Rates, TimePlan
from recipes.plan.timing import time_of
from recipes.plan.traffic import traffic_of
from recipes.registry import MODELS
from recipes.schema import RecipeConfig
from recipes.schema.derived import micro_batch, num_micro_batches, sharding_factor
from recipes.schema.training import HardwareConfig

_NO_END = 1 << 62  # bytes


@dataclass(frozen=True)
class Prediction:
    """A plan and what it was read off, for pictures and tests."""

    plan: Plan
    recorded: RecordedRun
    timeline: Timeline
    memory: MemoryReport


def plan(config: RecipeConfig, world_size: int, local_world_size: int, hardware: HardwareConfig | None = None) -> Plan:
    """What one rank of ``world_size`` would do, on hosts of ``local_world_size`` ranks.

    hardware: the profile; None: the config's own.

    Raises:
        ValueError: the profile knows too little. UnknownSize: only the data can tell a size.
    """
    machine = machine_of(hardware or config.hardware, local_world_size, world_size)
    return predict(config, record_run(config, world_size, local_world_size), machine).plan


def predict(config: RecipeConfig, recorded: RecordedRun, machine: Machine) -> Prediction:
    """A recording on a machine. One recording serves any number of machines with hosts of the same size."""
    tape, first = recorded.tape, recorded.last_step
    timeline = play(tape, machine.hardware)
    is_packed = config.plan.packs_state
    endless = replay(tape, timeline, _NO_END, first, is_packed)
    # What never asks for more than there is takes the same way with a limit as without.
    has_room = endless.peak_reserved <= machine.hardware.usable_bytes
    memory = endless if has_room else replay(tape, timeline, machine.hardware.usable_bytes, first, is_packed)
    times = time_of(tape, timeline, first, machine.hardware)
    memory_plan = _memory(recorded, memory, endless, machine.hardware.usable_bytes)
    is_sound = memory_plan.fits and not memory_plan.num_alloc_retries
    collectives = [entry for entry in tape.entries[first:] if isinstance(entry, t.Collective)]
    world_size = recorded.world_size
    found = Plan(
        model=config.model.kind,
        num_parameters=recorded.num_parameters,
        num_units=len(recorded.report.units),
        world_size=world_size,
        ranks_per_host=recorded.local_world_size,
        sharding_factor=sharding_factor(config.sharding, world_size, recorded.local_world_size),
        reshard_after_forward=config.sharding.reshard_after_forward,
        micro_batch=micro_batch(config.train, world_size),
        num_micro_batches=num_micro_batches(config.train, world_size),
        hardware=machine.name,
        assumed=machine.assumed,
        habits=habits_in_words(config.plan),
        memory=memory_plan,
        traffic=traffic_of(collectives, recorded.local_world_size),
        time=times,
        rates=_rates(config, recorded, times, world_size) if is_sound else None,
        advice=(),
    )
    return Prediction(advice_for(found, config), recorded, timeline, memory)


def _memory(recorded: RecordedRun, memory: MemoryReport, endless: MemoryReport, usable: int) -> MemoryPlan:
    tape, first = recorded.tape, recorded.last_step
    at_peak, largest, peak_entry = bytes_by_kind(tape, kinds_of(tape, first, recorded.gradients), first)
    unit, phase = _place(tape, peak_entry)
    return MemoryPlan(
        at_peak=at_peak,
        peak_by_kind=largest,
        peak_unit=unit,
        peak_phase=phase,
        allocated=endless.peak_allocated,
        active=endless.peak_active,
        reserved=memory.peak_reserved if memory.failed_at is None else endless.peak_reserved,
        needed=endless.peak_reserved,
        usable=usable,
        largest_unit=recorded.report.largest_unit_bytes,
        num_alloc_retries=sum(index >= first for index in memory.retries_at),
        fits=memory.failed_at is None,
    )


def _place(tape: t.Tape, entry: int) -> tuple[str, str]:
    """Unit and phase that the host is in when it reaches the entry."""
    unit, phase = "", "optimizer"
    for one in tape.entries[: entry + 1]:
        if isinstance(one, t.Mark):
            if one.kind in ("forward", "backward"):
                unit, phase = one.unit, one.kind
            elif one.kind == "phase" and one.phase == "backward":
                unit, phase = "", "optimizer"
    return unit, phase


def _rates(config: RecipeConfig, recorded: RecordedRun, times: TimePlan, world_size: int) -> Rates:
    entry, step_s = MODELS[config.model.kind], times.step_s
    samples_per_s = config.train.global_batch / step_s
    flops = sample_flops(entry, config.model, recorded.info, config.train.activation_checkpointing)
    each = flop_rates(flops, samples_per_s / world_size, peak_flops(config.hardware, config.precision))
    return Rates(
        samples_per_s=samples_per_s,
        unit=recorded.unit,
        units_per_s=samples_per_s * recorded.units_per_sample,
        **each,
        qps_per_rank=samples_per_s / world_size if entry.task == "clicks" else None,
        days=config.train.steps * step_s / 86400,
    )
