"""A composed tree through the checker: the typed config, or every problem of composing and checking together."""

from __future__ import annotations

from launcher.check import About, check_tree
from launcher.compose import Composed
from launcher.errors import ConfigErrors, Problem
from launcher.schema import Config


def checked(composed: Composed) -> Config:
    """The config, with ``plugins`` as absolute paths. Raises ConfigErrors with everything that is wrong."""
    config, problems = check(composed)
    if problems:
        raise ConfigErrors(problems)
    return config


def check(composed: Composed) -> tuple[Config, list[Problem]]:
    """The config, usable only if there are no problems."""
    about = About(sources=composed.sources, joined=composed.joined)
    reading = check_tree(composed.tree, about, composed.failed)
    reading.config.plugins = [str(file) for file in composed.plugins]
    return reading.config, [*composed.problems, *reading.problems]
