"""Memory and bytes of the ways to shard on four ranks: RAF and NRAF, and F from 1 to W."""

from __future__ import annotations

import dataclasses

import torch

import fsdp_core
from fsdp_core.describe import ModelReport
from paper_runs import training
from paper_runs.answer import Answer, Chart, Table, mb, median_ratio
from paper_runs.decoder import Sizes, build, random_batches
from paper_runs.law import Bytes, bytes_of_step
from paper_runs.memory_probe import forget_peak, peak_bytes, resident_bytes, settle
from paper_runs.ranks import Pool, Ranks
from paper_runs.training import Setting, Training, Watched, shard, turns

RESHARD = (
    "Section 3.2.1 (RAF frees gathered parameters after forward, NRAF keeps them) and figure 8a: at most 4 GB "
    "between them. Bytes were given as formulas and never counted."
)
FACTOR = (
    "Section 3.2: F from 1 to W is 'a rich space' between replication and full sharding. Only F = 1, one hybrid and "
    "F = W were run; the sweep between was not."
)
WORLD = 4


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Of one setting, per rank, bytes. process: the most that the process held above what it held before the model."""

    watched: Watched
    law: Bytes
    report: ModelReport
    process: int
    step_over_first: float


def held(rank: int, sizes: Sizes, setting: Setting) -> int:
    """Bytes of resident memory, peak of a third step over before the model was built."""
    settle()
    forget_peak()
    before = resident_bytes()
    model = shard(build(sizes), setting)
    optimizer = torch.optim.AdamW(fsdp_core.flat_parameters(model), lr=1e-4, fused=True)
    one = Training(model, optimizer, random_batches(sizes, rank))
    for _ in range(2):
        one.step()
    resident_bytes()
    forget_peak()
    one.step()
    return peak_bytes() - before


def measure(
    ranks: Ranks, quiet: Ranks, sizes: Sizes, settings: dict[str, Setting], rounds: int
) -> dict[str, Footprint]:
    """quiet: ranks whose memory is looked at; no other model is alive there."""
    quiet.run(held, sizes, next(iter(settings.values())))  # what torch and gloo keep for themselves is there now
    process = {name: max(quiet.run(held, sizes, setting)) for name, setting in settings.items()}
    reports = {name: ranks.run(training.start, name, sizes, setting)[0] for name, setting in settings.items()}
    times = turns(ranks, list(settings), rounds, 1)
    watched = {name: ranks.run(training.watch, name)[0] for name in settings}
    ranks.run(training.drop, *settings)
    first = times[next(iter(settings))]
    return {
        name: Footprint(
            watched[name],
            bytes_of_step(reports[name], setting.reshard),
            reports[name],
            process[name],
            median_ratio(times[name], first),
        )
        for name, setting in settings.items()
    }


def _run(pool: Pool, small: bool, settings: dict[str, Setting]) -> tuple[Sizes, dict[str, Footprint]]:
    sizes = Sizes(layers=3, width=32, batch=1, seq_len=16) if small else Sizes(batch=1, seq_len=64)
    quiet = Ranks(WORLD)
    try:
        return sizes, measure(pool(WORLD), quiet, sizes, settings, 1 if small else 5)
    finally:
        quiet.close()


def run_reshard(pool: Pool, small: bool) -> Answer:
    settings = {
        f"F = {factor}, {name}": Setting(factor=factor, reshard=reshard, buffers="allocator")
        for factor in (4, 2)
        for name, reshard in (("RAF", True), ("NRAF", False))
    }
    sizes, found = _run(pool, small, settings)
    return Answer(RESHARD, _conditions(sizes), [_table(found, "F = 4, RAF")], _data(found))


def run_factor(pool: Pool, small: bool) -> Answer:
    settings = {f"F = {factor}": Setting(factor=factor, buffers="allocator") for factor in (1, 2, 4)}
    sizes, found = _run(pool, small, settings)
    lines = {
        "parameters, gradients, AdamW, buffers": [
            (int(name[4:]), (4 * one.watched.shards + one.watched.live) / 1e6) for name, one in found.items()
        ],
        "process": [(int(name[4:]), one.process / 1e6) for name, one in found.items()],
        "bytes sent": [(int(name[4:]), sum(one.watched.sent.values()) / 1e6) for name, one in found.items()],
    }
    chart = Chart("Sharding factor, 4 ranks", "F", "MB per rank", lines, log_x=True)
    return Answer(FACTOR, _conditions(sizes), [_table(found, "F = 1")], _data(found), chart)


def _conditions(sizes: Sizes) -> str:
    return (
        f"{WORLD} ranks of one thread on gloo_p2p, fp32, a unit per block, {sizes}, AdamW, gathered buffers from the "
        "allocator. Gathered and live bytes are the engine's own record, sent bytes its counter; process: the peak "
        "of resident memory over that before the model was built, the largest rank. Times: settings take turns, "
        "medians of ratios of a round."
    )


def _table(found: dict[str, Footprint], first: str) -> Table:
    rows = []
    for name, one in found.items():
        sent = one.watched.sent
        each = [mb(sent.get(kind, 0)) for kind in ("all_gather", "reduce_scatter", "all_reduce")]
        total = sum(sent.values())
        rows.append(
            (
                name,
                mb(4 * one.watched.shards),
                mb(one.watched.gathered),
                mb(one.watched.live),
                mb(one.process),
                *each,
                mb(total),
                f"{total / one.law.total:.4f}" if one.law.total else "-",
                f"{one.step_over_first:.2f}",
            )
        )
    header = ("", "parameters, gradients, AdamW", "gathered at most", "buffers at most", "process", "all-gather")
    header += ("reduce-scatter", "all-reduce", "sent in all", "over the formula", f"step time over {first}")
    return Table("MB per rank and step", header, rows)


def _data(found: dict[str, Footprint]) -> dict[str, object]:
    return {
        name: {
            "watched": vars(one.watched),
            "law": vars(one.law),
            "process": one.process,
            "step_over_first": one.step_over_first,
        }
        for name, one in found.items()
    }
