"""What ``action=`` names beside training: one module each. No torch here.

``check``, ``export``, ``figure``, ``inspect``, ``plan`` and ``tune`` are done by this process; ``calibrate``, ``eval``
and ``generate`` need ranks, as training does.
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.actions import check, export, inspect
from launcher.planning import figure, plan, tune
from launcher.request import LaunchRequest
from launcher.schema import Config

Action = Callable[[Config, LaunchRequest], int]

IN_THIS_PROCESS: dict[str, Action] = {
    "check": check.run,
    "export": export.run,
    "figure": figure.run,
    "inspect": inspect.run,
    "plan": plan.run,
    "tune": tune.run,
}
