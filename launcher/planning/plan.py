"""``action=plan``: what the run that these words describe would need and do. Torch comes with the work itself."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from launcher import run_folder
from launcher.announce import short
from launcher.errors import EXIT_DOES_NOT_FIT, EXIT_OK, ConfigErrors, Problem
from launcher.planning.folder import PAGE, plan_folder
from launcher.request import LaunchRequest
from launcher.schema import Config


def run(config: Config, request: LaunchRequest) -> int:
    """Prints the table, leaves plan.json and plan.html; the exit code says whether the run fits.

    Raises:
        ConfigErrors: only the data can tell a size that the model needs, or the folder cannot be used.
    """
    answers = import_module("recipes.plan.answer")  # by name and now: it imports torch
    cluster = config.cluster
    found = answered(answers, config, cluster.num_nodes * cluster.nproc_per_node, cluster.nproc_per_node)
    folder = plan_folder(config, request.choices.get("model") or config.model.kind)
    with run_folder.usable(folder):
        answers.write(found, folder, " ".join(request.command))
    print(found.text, f"picture     {short(folder / PAGE)}", sep="\n")
    return EXIT_OK if found.plan.fits else EXIT_DOES_NOT_FIT


def answered(answers: Any, config: Config, world_size: int, ranks_per_host: int) -> Any:
    """Raises ConfigErrors for what the user can mend."""
    try:
        return answers.answer(config, world_size, ranks_per_host)
    except answers.USERS_ERRORS as error:
        raise ConfigErrors([Problem(f"no plan can be made: {error}")]) from None
