"""A plan as lines for people. GB are 1e9 bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recipes.amounts import gb
from recipes.plan.result import KINDS, MemoryPlan, Plan, TimePlan, TrafficPlan

Row = tuple[str, str]


def text_of(plan: Plan) -> str:
    """The table of ``action=plan``."""
    rows = [
        *_what(plan),
        *_memory(plan.memory),
        *_traffic(plan.traffic, plan),
        *_time(plan),
        *_speed(plan),
    ]
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:<{width}}{value}".rstrip() for name, value in rows]
    for advice in plan.advice:
        lines.append(f"{'does not fit' if advice.is_blocking else 'warning'}: {advice.what}")
        if advice.change:
            lines.append(f"  try {advice.change}")
    if plan.habits:
        lines.append(f"not of this engine, by {', '.join(plan.habits)}; a run here needs what plan=default says")
    if plan.assumed:
        lines.append(f"assumed, not measured here: {', '.join(plan.assumed)}; set them in a profile of your own")
    return "\n".join(lines)


HEADER = (
    "W",
    "F",
    "reshard",
    "micro",
    "accumulate",
    "allocated",
    "active",
    "reserved",
    "margin",
    "step",
    "TFLOPS",
    "MFU",
    "verdict",
)


def row_of(plan: Plan) -> tuple[str, ...]:
    """One plan among many (``-m``), under ``HEADER``."""
    memory, rates = plan.memory, plan.rates
    tflops = None if rates is None else rates.hardware_tflops_per_rank
    mfu = None if rates is None else rates.mfu
    return (
        str(plan.world_size),
        str(plan.sharding_factor),
        "RAF" if plan.reshard_after_forward else "NRAF",
        str(plan.micro_batch),
        str(plan.num_micro_batches),
        gb(memory.allocated),
        gb(memory.active),
        gb(memory.reserved),
        gb(memory.margin),
        "-" if rates is None else seconds(plan.time.step_s),
        "-" if tflops is None else f"{tflops:.1f}",
        "-" if mfu is None else f"{100 * mfu:.1f}%",
        verdict(plan),
    )


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def verdict(plan: Plan) -> str:
    """In a word: fits, retries, does not fit."""
    if not plan.fits:
        return "does not fit"
    return f"{plan.memory.num_alloc_retries} retries a step" if plan.has_retries else "fits"


def _what(plan: Plan) -> Iterator[Row]:
    yield "model", f"{plan.model}, {plan.num_parameters:,} parameters in {plan.num_units} units"
    hosts = -(-plan.world_size // plan.ranks_per_host)
    yield "ranks", f"W = {plan.world_size}: {hosts} x {plan.ranks_per_host} of {plan.hardware}"
    kept = "RAF" if plan.reshard_after_forward else "NRAF"
    yield "sharding", f"F = {plan.sharding_factor}, {kept}"
    yield "batch", f"{plan.micro_batch} samples x {plan.num_micro_batches} micro-batches on each rank"


def _memory(memory: MemoryPlan) -> Iterator[Row]:
    yield "memory", f"{verdict_of_memory(memory)}; peaks of one rank:"
    yield "  allocated", f"{gb(memory.allocated)}, {peak_place(memory)}"
    yield "  active", gb(memory.active)
    yield "  reserved", f"{gb(memory.reserved)} of {gb(memory.usable)} usable"
    in_units = f", {memory.margin_units:+.1f} gathered units" if memory.largest_unit else ""
    yield "  margin", f"{gb(memory.margin)}{in_units} to the first allocator retry"
    for kind in KINDS:
        largest = memory.peak_by_kind.get(kind, 0)
        if largest:
            yield f"    {kind}", f"{gb(memory.at_peak.get(kind, 0))} at the peak, {gb(largest)} at most"


def verdict_of_memory(memory: MemoryPlan) -> str:
    if not memory.fits:
        return "does not fit"
    return f"fits, with {memory.num_alloc_retries} allocator retries a step" if memory.num_alloc_retries else "fits"


def peak_place(memory: MemoryPlan) -> str:
    """Where the host is when most is allocated."""
    return f"most in {memory.peak_phase}" + (f" of {memory.peak_unit}" if memory.peak_unit else "")


def _traffic(traffic: TrafficPlan, plan: Plan) -> Iterator[Row]:
    yield "bytes of a step", "sent by one rank:"
    yield "  inside hosts", gb(traffic.intra_host)
    yield "  between hosts", f"{gb(traffic.cross_host)} as rings cross ({gb(traffic.per_host)} a host)"
    if traffic.cross_host_by_hop != traffic.cross_host:
        yield "", f"{gb(traffic.cross_host_by_hop)} if every hop of a ring crossed, as the paper's formulas count"
    for row in traffic.rows:
        yield f"    {row.primitive} {row.phase}".rstrip(), f"{row.calls} calls, {gb(row.nbytes)}"


def _time(plan: Plan) -> Iterator[Row]:
    time = plan.time
    if plan.rates is None:
        yield "step", "no time is told: memory decides it first"
        return
    yield "step", f"{seconds(time.step_s)}; never below {seconds(time.floor_s)} (latency, issuing)"
    phases = {"forward": time.forward_s, "backward": time.backward_s, "optimizer": time.optimizer_s}
    yield "  phases", ", ".join(f"{name} {share(part_s, time)}" for name, part_s in phases.items())
    yield "  compute", f"{seconds(time.compute_s)} busy"
    yield "  communication", f"{seconds(time.communication_s)}, of which {seconds(time.exposed_s)} are waited for"
    yield "  host", f"{seconds(time.idle_s)} are waited for it"


def _speed(plan: Plan) -> Iterator[Row]:
    rates = plan.rates
    if rates is None:
        return
    if rates.tflops_per_rank is not None and rates.hardware_tflops_per_rank is not None:
        yield "TFLOPS", f"{rates.tflops_per_rank:.1f} a rank, {rates.hardware_tflops_per_rank:.1f} with recomputation"
    if rates.mfu is not None and rates.hfu is not None:
        yield "MFU", f"{100 * rates.mfu:.1f} %, HFU {100 * rates.hfu:.1f} %"
    yield "speed", f"{rates.units_per_s:,.0f} {rates.unit}/s, {rates.samples_per_s:,.1f} samples/s"
    if rates.qps_per_rank is not None:
        yield "QPS", f"{rates.qps_per_rank:,.0f} a rank"
    yield "all steps", f"{rates.days:.2f} days" if rates.days >= 0.1 else seconds(86400 * rates.days)


def share(part_s: float, time: TimePlan) -> str:
    return f"{seconds(part_s)} ({100 * part_s / time.step_s:.0f} %)"


def seconds(value: float) -> str:
    """With three digits and a fitting unit."""
    if value >= 120:
        return f"{value / 60:.1f} min"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} us"
