"""``-m action=plan``: every combination planned in this process, one table and one picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from launcher import run_folder
from launcher.announce import short
from launcher.compose import Composer
from launcher.errors import EXIT_DOES_NOT_FIT, EXIT_OK
from launcher.planning.folder import PAGE, plan_folder
from launcher.planning.plan import answered
from launcher.sweep.plan import Planned


def plan_all(jobs: Sequence[Planned], composer: Composer) -> int:
    """The exit code is that of a plan that does not fit only if none of them does.

    Raises:
        ConfigErrors: as ``plan.run``.
    """
    answers = import_module("recipes.plan.answer")  # by name and now: it imports torch
    many = import_module("recipes.plan.many")
    plans = []
    for number, job in enumerate(jobs):
        if sys.stderr.isatty():
            print(f"\rplanning {number + 1} of {len(jobs)} ", end="", file=sys.stderr, flush=True)
        cluster = job.config.cluster
        world_size = cluster.num_nodes * cluster.nproc_per_node
        plans.append(answered(answers, job.config, world_size, cluster.nproc_per_node).plan)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    labels = [tuple(job.swept.values()) for job in jobs]
    table = many.table_of(tuple(jobs[0].swept), labels, plans)
    folder = plan_folder(jobs[0].config, jobs[0].config.model.kind)
    with run_folder.usable(folder):
        many.write(folder, tuple(jobs[0].swept), labels, plans, table)
    print(table, f"picture: {short(folder / PAGE)}", sep="\n")
    return EXIT_OK if any(plan.fits for plan in plans) else EXIT_DOES_NOT_FIT
