"""From a command line to checked jobs: every combination is composed and checked before anything is made or started."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from launcher.checked import check
from launcher.compose import Composer
from launcher.errors import ConfigErrors, Problem
from launcher.resolved import to_tree
from launcher.schema import Config, SweepConfig
from launcher.words import jobs_of

_NOT_SWEPT = ("action", "plugins", "run.dir", "cluster.kind", "cluster")


@dataclass(frozen=True)
class Planned:
    """A job that may run.

    swept: the values that set it apart, as typed. config: checked; a single run's, without ``sweep`` and run.dir.
    asked: the sweep's own section, as this job's overrides have it. overrides: all of them.
    params: what a search chose.
    """

    swept: dict[str, str]
    config: Config
    asked: SweepConfig
    overrides: tuple[str, ...]
    content_hash: str
    params: Mapping[str, Any] = field(default_factory=dict)


def swept_keys(composer: Composer) -> list[str]:
    return [override.key_or_group for override in composer.words.overrides if override.is_sweep_override()]


def plan_grid(composer: Composer) -> list[Planned]:
    """Every combination, in Hydra's order.

    Raises:
        ConfigErrors: the problems of all jobs, each told once with the jobs that have it.
    """
    keys = swept_keys(composer)
    found: dict[Problem, list[int]] = {}
    planned: list[Planned] = []
    combinations = _combinations(composer)
    if not combinations:
        what = "there is no combination: one of the swept keys has no value"
        raise ConfigErrors([Problem(what, source=f"command line: {' '.join(composer.line.words)}")])
    for number, overrides in enumerate(combinations):
        job, wrong = plan_one(composer, overrides, keys)
        for problem in wrong:
            found.setdefault(problem, []).append(number)
        if job is not None:
            planned.append(job)
    if found:
        raise ConfigErrors([_with_jobs(problem, numbers, len(combinations)) for problem, numbers in found.items()])
    return planned


def plan_one(
    composer: Composer, overrides: Sequence[Override], keys: Sequence[str], params: Mapping[str, Any] | None = None
) -> tuple[Planned | None, list[Problem]]:
    """One combination: its job, or what is wrong with it."""
    try:
        config, problems = check(composer.compose(overrides))
    except ConfigErrors as errors:
        return None, errors.problems
    if problems:
        return None, problems
    asked, config.sweep = config.sweep, SweepConfig()
    values = {override.key_or_group: override.get_value_string() for override in overrides}
    words = tuple(f"{override.key_or_group}={override.get_value_string()}" for override in overrides)
    return Planned(
        swept={key: values[key] for key in keys},
        config=config,
        asked=asked,
        overrides=tuple(word for word in words if not word.startswith("sweep.")),
        content_hash=content_hash(config),
        params=params or {},
    ), []


def content_hash(config: Config) -> str:
    """Equal for configs that ask for the same computation: the run's name and place are left out, plugins are not."""
    tree = to_tree(config)
    tree["sweep"] = None
    tree["run"] = {**tree["run"], "dir": None, "name": None}
    tree["plugins"] = sorted(digest(Path(file)) for file in config.plugins)
    return hashlib.blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=16).hexdigest()


def digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def _combinations(composer: Composer) -> list[list[Override]]:
    try:
        return jobs_of(composer.words.overrides, composer.loader.hydra.config_loader)
    except HydraException as error:
        raise ConfigErrors([Problem(f"the sweep cannot be spelled out: {error}", source="command line")]) from None


def refusals(composer: Composer) -> list[Problem]:
    """What is wrong with the sweep as a whole; whatever its jobs had to say then would mislead."""
    problems = []
    is_search = wants_search(composer)
    if composer.joined is not None:
        what = "a sweep starts the ranks of each job itself; here ranks exist already"
        problems.append(Problem(what, source="environment: RANK and WORLD_SIZE", remedy="start it without torchrun"))
    for override in composer.words.overrides:
        key, source = override.key_or_group, f"command line: {override.input_line}"
        if override.is_sweep_override() and (key in _NOT_SWEPT or key.startswith("sweep.")):
            problems.append(Problem("this is one for the whole sweep", key, source=source, expected="one value"))
        elif key == "run.dir":
            what = "each job of a sweep has a run folder of its own, inside the sweep's"
            problems.append(Problem(what, key, source=source, remedy="sweep.dir=PATH"))
        elif override.value_type is ValueType.INTERVAL_SWEEP and not is_search:
            what = "a grid cannot try every value of an interval"
            remedy = f"a search: hydra/sweeper=optuna; or values: {key}=1e-3,1e-4"
            problems.append(Problem(what, key, source=source, expected="single values", remedy=remedy))
    return problems


def wants_search(composer: Composer) -> bool:
    """Whether ``sweep.sweeper``, typed or from a preset, is a search."""
    try:
        tree = composer.compose([word for word in composer.words.overrides if not word.is_sweep_override()]).tree
    except ConfigErrors:
        return False  # said again, and better, by the jobs
    sweep = tree.get("sweep")
    return isinstance(sweep, dict) and sweep.get("sweeper", "grid") != "grid"


def _with_jobs(problem: Problem, numbers: list[int], num_jobs: int) -> Problem:
    if len(numbers) == num_jobs:
        return problem
    listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return replace(problem, what=f"{problem.what} (job {listed} of {num_jobs})")
