"""``action=export``: a checkpoint as a Hugging Face folder, by this process alone. Torch comes with the work itself."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType

from launcher.errors import EXIT_OK, ConfigErrors, Problem
from launcher.rank_signals import exit_code_of
from launcher.request import LaunchRequest
from launcher.schema import Config


def run(config: Config, request: LaunchRequest) -> int:
    """Raises ConfigErrors for what is wrong with checkpoint, folder or data; nothing is left behind then."""
    # By name and now: this module imports torch.
    exporting = import_module("recipes.exporting")
    try:
        with signals_unwind():
            print(exporting.run(config))
    except exporting.USERS_ERRORS as error:
        raise ConfigErrors([Problem(str(error))]) from None
    return EXIT_OK


@contextmanager
def signals_unwind() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, through what clears the half-written folder away."""

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(exit_code_of(signum))

    before = {signum: signal.signal(signum, leave) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
