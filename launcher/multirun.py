"""``-m``: every combination of the swept values is composed and checked in this process, and listed in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from launcher.checked import check
from launcher.compose import Composer
from launcher.errors import EXIT_OK, ConfigErrors, Problem
from launcher.facts import facts_of
from launcher.schema import Config
from launcher.words import jobs_of


@dataclass(frozen=True)
class Job:
    """One combination: what differs from the other jobs, and its checked config."""

    swept: dict[str, str]
    config: Config


def check_jobs(composer: Composer) -> int:
    """Print the table of all jobs.

    Raises:
        ConfigErrors: the problems of all jobs, each told once with the jobs that have it; or the action is not
            ``check``, the only one that -m has in this version.
    """
    swept = [override.key_or_group for override in composer.words.overrides if override.is_sweep_override()]
    problems: dict[Problem, list[int]] = {}
    jobs: list[Job] = []
    combinations = _combinations(composer)
    for number, overrides in enumerate(combinations):
        config, found = _check_one(composer, overrides)
        for problem in found:
            problems.setdefault(problem, []).append(number)
        if config is not None:
            values = {override.key_or_group: override.get_value_string() for override in overrides}
            jobs.append(Job({key: values[key] for key in swept}, config))
    if problems:
        raise ConfigErrors([_with_jobs(problem, numbers, len(combinations)) for problem, numbers in problems.items()])
    if any(job.config.action != "check" for job in jobs):
        what = "sweeps (-m) are not available in this version, except to check and list their jobs"
        raise ConfigErrors(
            [Problem(what, "action", jobs[0].config.action, expected="check", remedy="-m action=check ...")]
        )
    print(table(jobs))
    print(f"ok: {len(jobs)} jobs")
    return EXIT_OK


def table(jobs: Sequence[Job]) -> str:
    """One row per job: swept values, then what follows from them."""
    header = ["job", *jobs[0].swept, "W", "F", "reshard", "micro", "accumulate", "parameters", "shard bytes"]
    rows = [header, *(_row(number, job) for number, job in enumerate(jobs))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(number: int, job: Job) -> list[str]:
    facts = facts_of(job.config)
    size, shard_bytes = facts.size, facts.shard_bytes
    return [
        str(number),
        *job.swept.values(),
        str(facts.world_size),
        str(facts.factor),
        "RAF" if job.config.sharding.reshard_after_forward else "NRAF",
        str(facts.micro_batch),
        str(facts.num_micro_batches),
        "?" if size is None else f"{size.numel:,}",
        "?" if shard_bytes is None else f"{shard_bytes:,}",
    ]


def _combinations(composer: Composer) -> list[list[Override]]:
    try:
        return jobs_of(composer.words.overrides, composer.loader.hydra.config_loader)
    except HydraException as error:
        raise ConfigErrors([Problem(f"the sweep cannot be spelled out: {error}", source="command line")]) from None


def _check_one(composer: Composer, overrides: list[Override]) -> tuple[Config | None, list[Problem]]:
    try:
        config, problems = check(composer.compose(overrides))
    except ConfigErrors as errors:
        return None, errors.problems
    return (None, problems) if problems else (config, [])


def _with_jobs(problem: Problem, numbers: list[int], num_jobs: int) -> Problem:
    if len(numbers) == num_jobs:
        return problem
    listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return replace(problem, what=f"{problem.what} (job {listed} of {num_jobs})")
