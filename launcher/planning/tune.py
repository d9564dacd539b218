"""``action=tune``: a search for better words, each point planned in this process. Torch comes with the work itself."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from launcher.errors import EXIT_DOES_NOT_FIT, EXIT_OK, ConfigErrors, Problem
from launcher.request import LaunchRequest
from launcher.schema import Config


def run(config: Config, request: LaunchRequest) -> int:
    """Prints the Pareto front and the overrides of the best.

    Raises:
        ConfigErrors: only the data can tell a size that the model needs.
    """
    tuning = import_module("recipes.plan.tune")  # by name and now: it imports torch
    answers = import_module("recipes.plan.answer")
    per_host = config.cluster.nproc_per_node
    world_size, objective = config.cluster.num_nodes * per_host, config.tune.objective
    planner = tuning.planner_for(config, world_size, per_host)
    search = tuning.Search(config, planner, world_size, objective, _progress)
    try:
        best = search.run(tuning.knobs_of(config, world_size, per_host), config.tune.max_plans)
    except answers.USERS_ERRORS as error:
        raise ConfigErrors([Problem(f"no plan can be made: {error}")]) from None
    if not best.is_sound:
        print(f"none of {len(search.tried)} plans goes through without retries; the one that needs least memory:")
        print(tuning.table_of([best]))
        return EXIT_DOES_NOT_FIT
    print(f"{len(search.tried)} plans made; those that none beats in both memory and speed:")
    print(tuning.table_of(search.front()))
    start = next(iter(search.tried.values()))
    print(f"best: {tuning.overrides_of(best, config, world_size, objective)}")
    print("why: " + "; ".join(tuning.reasons(best, start)))
    return EXIT_OK


def _progress(tried: Any) -> None:
    words = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in tried.choice)
    found = f"{tried.samples_per_s:,.1f} samples/s" if tried.is_sound else "no"
    print(f"{words}: {found}", file=sys.stderr, flush=True)
