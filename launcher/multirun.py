"""``-m``: every combination of the swept values is composed and checked, then listed or run."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.compose import Composer
from launcher.errors import EXIT_OK, ConfigErrors, Problem
from launcher.facts import facts_of
from launcher.planning.many import plan_all
from launcher.sweep.plan import Planned, plan_grid, refusals, wants_search
from launcher.sweep.search import start_search
from launcher.sweep.start import start_grid
from launcher.sweep.table import one_line


def run_sweep(composer: Composer, arguments: Sequence[str]) -> int:
    """The exit code of a command with ``-m``. Nothing is made or started unless every job is right.

    Raises:
        ConfigErrors: the problems of all jobs, each told once with the jobs that have it; or what else is wrong.
    """
    if problems := refusals(composer):
        raise ConfigErrors(problems)
    if wants_search(composer):
        return start_search(composer, arguments)
    planned = plan_grid(composer)
    action = planned[0].config.action
    if action == "train":
        return start_grid(composer, planned, arguments)
    if action == "plan":
        return plan_all(planned, composer)
    if action != "check":
        what = "this action works on one run at a time"
        raise ConfigErrors(
            [Problem(what, "action", action, expected="train, check or plan with -m", remedy="leave -m out")]
        )
    print(listing(planned))
    print(f"ok: {len(planned)} jobs")
    return EXIT_OK


def listing(jobs: Sequence[Planned]) -> str:
    """One row per job: swept values, then what follows from them."""
    header = ["job", *jobs[0].swept, "W", "F", "reshard", "micro", "accumulate", "parameters", "shard bytes"]
    rows = [header, *(_row(number, job) for number, job in enumerate(jobs))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(number: int, job: Planned) -> list[str]:
    facts = facts_of(job.config)
    size, shard_bytes = facts.size, facts.shard_bytes
    return [
        str(number),
        *map(one_line, job.swept.values()),
        str(facts.world_size),
        str(facts.factor),
        "RAF" if job.config.sharding.reshard_after_forward else "NRAF",
        str(facts.micro_batch),
        str(facts.num_micro_batches),
        "?" if size is None else f"{size.numel:,}",
        "?" if shard_bytes is None else f"{shard_bytes:,}",
    ]
