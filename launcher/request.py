"""``LaunchRequest``: what the command line hands to the process side, next to the checked ``Config``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LaunchRequest:
    """How the run was asked for. The config itself is data; these facts never come from a stored config.

    argv: the arguments as typed, without the program's name.
    overrides: the ``key=value`` arguments among them.
    plugins: the user's Python files, absolute paths, in the order given; already imported in this process.
    choices: the preset chosen in each group (``{"model": "gpt_tiny", ...}``); a list group joins its names with ",".
    """

    argv: tuple[str, ...]
    overrides: tuple[str, ...]
    plugins: tuple[Path, ...]
    choices: dict[str, str]
