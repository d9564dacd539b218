"""What is refused wherever it stands but on the command line: code named by a config."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.check.about import About
from launcher.check.rules.rule import Rules
from launcher.errors import Problem
from launcher.schema import Config

RULES = Rules()


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
