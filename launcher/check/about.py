"""What rules may know beside the config: where values came from, what this machine has, what is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field

from launcher.environment import JoinedRanks
from launcher.errors import Problem
from launcher.machine import num_gpus
from launcher.sources import Sources


def is_installed(module: str) -> bool:
    """Whether a top-level module could be imported; does not import it."""
    return importlib.util.find_spec(module) is not None


@dataclass(frozen=True)
class About:
    """Surroundings of one check.

    sources: where values came from.
    joined: ranks that somebody else started, if any.
    is_typed: the config was composed from a command line just now (False: read back from a run folder).
    gpus, installed: asked late, replaced in tests.
    """

    sources: Sources = field(default_factory=Sources)
    joined: JoinedRanks | None = None
    is_typed: bool = True
    gpus: Callable[[], int] = num_gpus
    installed: Callable[[str], bool] = is_installed

    def problem(
        self,
        key: str,
        what: str,
        *,
        got: object = None,
        expected: str = "",
        remedy: str = "",
        also: tuple[str, ...] = (),
    ) -> Problem:
        """A problem of ``key``; ``also`` names the other keys of the contradiction, whose sources are told too."""
        source = self.sources.of(key)
        others = [f"{other} from {self.sources.of(other)}" for other in also if self.sources.of(other)]
        if others:
            source = "; ".join([source or "default", *others])
        return Problem(what, key, None if got is None else str(got), source, expected, remedy)
