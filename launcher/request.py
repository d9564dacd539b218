"""``LaunchRequest``: what the command line hands to ``launcher.launch.launch`` beside the checked config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LaunchRequest:
    """The composed run as text, for the ranks and for the run folder.

    config_yaml: the composed config, fully resolved, without Hydra's own node; a rank reads it back through the
        same checker.
    overrides: what the user typed after the command, one override each, as typed.
    command: the whole command line (``sys.argv``), program first.
    choices: preset chosen in each group (``{"model": "gpt_tiny", ...}``).
    """

    config_yaml: str
    overrides: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)
