"""``action=check``: the facts of a config that is right."""

from __future__ import annotations

from launcher.errors import EXIT_OK
from launcher.facts import summary
from launcher.request import LaunchRequest
from launcher.schema import Config
from launcher.streams import visible


def run(config: Config, request: LaunchRequest) -> int:
    print(visible(summary(config, dict(request.choices))), "ok", sep="\n")
    return EXIT_OK
