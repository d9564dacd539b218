"""Options that are refused: those that this version does not have yet, and code named by a stored config."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.check.about import About
from launcher.check.rules.rule import Rules
from launcher.errors import Problem
from launcher.schema import Config

AVAILABLE_ACTIONS = (
    "train",
    "check",
    "eval",
    "generate",
    "export",
    "inspect",
    "plan",
    "tune",
    "figure",
    "print_script",
    "sweep",
)
RULES = Rules()


def _not_yet(about: About, key: str, got: object, remedy: str, expected: str = "") -> Problem:
    return about.problem(key, "not available in this version", got=got, expected=expected, remedy=remedy)


@RULES.reading("action")
def actions(config: Config, about: About) -> Iterator[Problem]:
    if config.action not in AVAILABLE_ACTIONS:
        yield _not_yet(about, "action", config.action, "leave action out to train", ", ".join(AVAILABLE_ACTIONS))


@RULES.reading("plugins")
def plugins(config: Config, about: About) -> Iterator[Problem]:
    """Reading a config must not run code that somebody else put there."""
    if config.plugins and not about.sources.is_typed("plugins"):
        yield about.problem(
            "plugins",
            "plugins are named on the command line only, never in a config file",
            got=config.plugins,
            remedy=f"plugins='[{','.join(config.plugins)}]' on the command line",
        )
