"""Hybrid sharding that is aligned with hosts and that is not, on two hosts with a slow cable between them.

Hosts are network namespaces; what crosses is read from their interfaces and compared with the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from fsdp_core.describe import ModelReport
from paper_runs import training
from paper_runs.answer import Answer, Table, mb, median_ratio
from paper_runs.decoder import Sizes
from paper_runs.law import bytes_of_step
from paper_runs.namespaces import Hosts, Sent, sent_by_host, why_not
from paper_runs.ranks import HostRanks, Pool
from paper_runs.training import Setting, turns

STATEMENT = (
    "Section 3.2.2: hybrid sharding inside hosts reduces cross-host traffic to 2M(W-1)/(GW) a rank, from 3M(W-1)/W "
    "of full sharding. Traffic was not measured, nor was the same F across hosts, so the gain may come from F alone."
)
PER_HOST, WORLD = 2, 4
SETTINGS = {
    "F = 4, RAF": Setting(factor=4, ranks_per_host=PER_HOST),
    "F = 4, NRAF": Setting(factor=4, reshard=False, ranks_per_host=PER_HOST),
    "F = 2 inside hosts, RAF": Setting(rows=((0, 1), (2, 3)), ranks_per_host=PER_HOST),
    "F = 2 across hosts, RAF": Setting(rows=((0, 2), (1, 3)), ranks_per_host=PER_HOST),
    "F = 1": Setting(factor=1, ranks_per_host=PER_HOST),
}


@dataclass(frozen=True)
class Crossed:
    """sent: by the ranks of this host to the other one, in some steps. counted: by the engine, of one rank."""

    sent: Sent
    counted: int


def crossing(rank: int, name: str, steps: int) -> Crossed:
    """All ranks of a host see the same interface."""
    dist.barrier()
    before = sent_by_host()
    dist.barrier()  # nobody sends before all have looked
    counted = sum(training.watch(rank, name).cross for _ in range(steps))
    dist.barrier()
    return Crossed(sent_by_host().since(before), counted)


def run(pool: Pool, small: bool) -> Answer:
    sizes = Sizes(layers=2, width=64, batch=1, seq_len=16) if small else Sizes(layers=4, width=256, batch=1, seq_len=64)
    rates: tuple[float | None, ...] = (None, 200.0) if small else (None, 1000.0, 250.0)
    rounds, steps = (1, 2) if small else (3, 4)
    conditions = (
        f"Two network namespaces joined by one cable, {PER_HOST} ranks on each (W = {WORLD}, G = {PER_HOST}), "
        f"gloo_p2p, fp32, a unit per block, {sizes}, AdamW. Bytes: what the interfaces sent in {steps} steps, per "
        "rank and step; packets are large ones of up to 64 KB, headers are 66 bytes of each. Rates are set with tbf; "
        "medians of ratios of a round."
    )
    why = why_not()
    if why is not None:
        return Answer(STATEMENT, conditions, skipped=why)
    with Hosts() as hosts:
        ranks = HostRanks(hosts, PER_HOST)
        try:
            reports = {name: ranks.run(training.start, name, sizes, one)[0] for name, one in SETTINGS.items()}
            crossed = {name: ranks.run(crossing, name, steps) for name in SETTINGS}
            times: dict[str, dict[str, list[float]]] = {}
            for rate in rates:
                hosts.set_rate(rate)
                times[_rate(rate)] = turns(ranks, list(SETTINGS), rounds, 1)
        finally:
            ranks.close()
    bytes_table, data = _bytes_table(reports, crossed, steps)
    rows = [
        (name, *(f"{median_ratio(found[name], found['F = 4, RAF']):.2f}" for found in times.values()))
        for name in SETTINGS
    ]
    times_table = Table("Step time over F = 4, RAF", ("", *times), rows)
    return Answer(STATEMENT, conditions, [bytes_table, times_table], {"times": times, "bytes": data})


def _rate(rate: float | None) -> str:
    return "no limit" if rate is None else f"{rate:g} Mbit/s a host"


def _bytes_table(
    reports: dict[str, ModelReport], crossed: dict[str, list[Crossed]], steps: int
) -> tuple[Table, dict[str, dict[str, float]]]:
    rows, data = [], {}
    model = 4 * next(iter(reports.values())).num_parameters
    for name, report in reports.items():
        setting = SETTINGS[name]
        sides = [crossed[name][0].sent, crossed[name][PER_HOST].sent]
        raw, payload = (sum(getattr(side, what) for side in sides) / WORLD / steps for what in ("nbytes", "payload"))
        counted = sum(one.counted for one in crossed[name]) / WORLD / steps
        exact = bytes_of_step(report, setting.reshard, PER_HOST).cross
        data[name] = {"interface": raw, "payload": payload, "counted": counted, "law": exact}
        cells = [mb(value) for value in (raw, counted, exact)]
        cells += [f"{100 * (raw / payload - 1):.2f} %", f"{payload / exact:.4f}", f"{raw / exact:.4f}"]
        rows.append((name, *cells, *(mb(value) for value in _approximations(setting, model))))
    header = ("", "interface MB", "engine's counter MB", "formula MB", "headers", "payload / formula")
    header += ("interface / formula", "every hop charged (the paper's way) MB", "ring in host order MB")
    return Table(f"Across hosts, per rank and step; the model has {mb(model)} MB", header, rows), data


def _approximations(setting: Setting, model: int) -> tuple[float, float]:
    """docs/engine.md, bytes per step: what a rank sends in groups that span hosts; what a ring in host order takes
    across. For F = 2 across hosts gathers and the reduce-scatter span hosts, the all-reduce does not."""
    times = 3 if setting.reshard else 2
    if setting.rows:
        is_aligned = setting.rows[0][0] // PER_HOST == setting.rows[0][1] // PER_HOST
        charged = 2 * model * (WORLD - PER_HOST) / (PER_HOST * WORLD) if is_aligned else times * model / 2
        return charged, charged
    if setting.factor == 1:
        times = 2
    charged = times * model * (WORLD - 1) / WORLD
    return charged, charged / PER_HOST
