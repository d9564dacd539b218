"""The rate limiter at 1, 2, 3, 4 and without: what is live, and what it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from paper_runs import training
from paper_runs.answer import Answer, Table, mb, median_ratio
from paper_runs.decoder import Sizes
from paper_runs.ranks import Pool
from paper_runs.training import Setting, turns

STATEMENT = (
    "Section 3.4.2: at most two gathers in flight, 'the minimum to still overlap', and figure 6c: up to 5 times "
    "faster, or 5 % slower. No other limit was tried, and what the limit does to memory was not shown."
)
LIMITS = (1, 2, 3, 4, 0)
ROOT = Path(__file__).resolve().parents[2]


def run(pool: Pool, small: bool) -> Answer:
    sizes = Sizes(layers=3, width=32, batch=1, seq_len=16) if small else Sizes()
    rounds = 1 if small else 5
    ranks = pool(2)
    settings = {
        f"{_named(limit)}{', forward prefetch' if early else ''}": Setting(
            limit=limit, forward_prefetch=early, slow=True
        )
        for early in (False, True)
        for limit in LIMITS
    }
    units = {name: ranks.run(training.start, name, sizes, setting)[0] for name, setting in settings.items()}
    try:
        watched = {name: ranks.run(training.watch, name)[0] for name in settings}
        step_s = min(turns(ranks, ["2"], 2, 1)["2"])
        ranks.run(training.set_card, sum(watched["2"].sent.values()) / step_s, 0.0)
        times = turns(ranks, list(settings), rounds, 1)
    finally:
        ranks.run(training.set_card, float("inf"), 0.0)
        ranks.run(training.drop, *settings)
    unit = units["2"].largest_unit_bytes
    rows = [
        (
            name,
            str(one.in_flight),
            str(one.buffers),
            f"{mb(one.gathered)} ({one.gathered / unit:.1f} units)",
            f"{median_ratio(times[name], times['2']):.2f}",
        )
        for name, one in watched.items()
    ]
    real = Table(
        "Real ranks on CPU, behind a card that takes as long as computing",
        ("limit", "in flight at most", "gathered buffers at most", "gathered MB at most", "step time over limit 2"),
        rows,
    )
    plans = planned(small)
    return Answer(
        STATEMENT,
        f"Real: 2 ranks, F = 2, RAF, a unit per block ({mb(unit)} MB), {sizes}, AdamW. On CPU the host is the device "
        "and runs no further ahead than prefetch does, one unit. A device that lags behind its host is replayed: the "
        f"engine's own schedule recorded by action=plan, {PLANNED[small]}; no GPU was used.",
        [real, _planned_table(plans)],
        {"times": times, "watched": {name: vars(one) for name, one in watched.items()}, "planned": plans},
    )


def _named(limit: int) -> str:
    return str(limit) if limit else "none"


PLANNED = {
    False: "T5-11B, two hosts of 8 A100s, bf16, micro-batch 8, buffers from the allocator as in the paper, and pooled",
    True: "a tiny GPT",
}
WORDS = {
    False: [
        *("model=t5_11b", "data.seq_len=512", "cluster.num_nodes=2", "cluster.nproc_per_node=8", "precision=bf16"),
        *("hardware=a100_80gb", "train.global_batch=128", "train.activation_checkpointing=true"),
    ],
    True: [
        "model=gpt_tiny",
        "data.seq_len=64",
        "cluster.nproc_per_node=4",
        "hardware=a100_80gb",
        "train.global_batch=4",
    ],
}


def planned(small: bool) -> list[dict[str, Any]]:
    """What action=plan says for every limit."""
    found = []
    for buffers in ("allocator",) if small else ("allocator", "pooled"):
        words = [*WORDS[small], f"sharding.gather_buffers={buffers}"]
        limits = ",".join(str(limit) for limit in LIMITS if limit)
        for label, more in ((None, [f"rate_limiter.max_inflight={limits}"]), ("none", ["rate_limiter=unlimited"])):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "launcher", "-m", "action=plan", *words, *more]
                environment = {**os.environ, "PYTHONPATH": str(ROOT)}
                done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
                files = list(Path(folder).rglob("plan.json"))
                if len(files) != 1:
                    raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
                jobs = json.loads(files[0].read_text())["jobs"]
            for job in jobs:
                limit = label or job["swept"]["rate_limiter.max_inflight"]
                found.append({"buffers": buffers, "limit": limit, "plan": job["plan"]})
    return found


def _planned_table(plans: list[dict[str, Any]]) -> Table:
    rows = []
    for one in plans:
        memory, time = one["plan"]["memory"], one["plan"]["time"]
        sizes = [
            f"{memory['peak_by_kind']['gathered'] / 1e9:.2f}",
            *(f"{memory[kind] / 1e9:.2f}" for kind in ("allocated", "active", "needed")),
        ]
        step, exposed = ("-" if time is None else f"{1e3 * time[key]:.4g}" for key in ("step_s", "exposed_s"))
        rows.append((one["buffers"], one["limit"], *sizes, str(memory["num_alloc_retries"]), step, exposed))
    header = ("buffers", "limit", "gathered GB", "allocated GB", "active GB", "reserved GB", "retries", "step ms")
    return Table("Replayed: a device that lags behind its host", (*header, "exposed ms"), rows)
