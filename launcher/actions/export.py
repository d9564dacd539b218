"""``action=export``: a checkpoint as a Hugging Face folder, by this process alone. Torch comes with the work itself."""

from __future__ import annotations

from importlib import import_module

from launcher.errors import EXIT_OK, ConfigErrors, Problem
from launcher.request import LaunchRequest
from launcher.schema import Config


def run(config: Config, request: LaunchRequest) -> int:
    """Raises ConfigErrors for what is wrong with checkpoint, folder or data; nothing is left behind then."""
    # By name and now: this module imports torch.
    exporting = import_module("recipes.exporting")
    try:
        print(exporting.run(config))
    except exporting.USERS_ERRORS as error:
        raise ConfigErrors([Problem(str(error))]) from None
    return EXIT_OK
