"""Where the command begins: before anything slow is imported, Ctrl-C ends it without a traceback."""

from __future__ import annotations

import os
import signal
from importlib import import_module
from types import FrameType

EXIT_INTERRUPTED = 130  # launcher.errors has the list; importing it is not needed yet


def main() -> int:
    """``fsdp-launch``. Returns the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
        program = import_module("launcher.cli")  # by name and now: a quarter of a second of Hydra
        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:  # somebody ignores Ctrl-C (nohup), or handles it
        program = import_module("launcher.cli")
    code: int = program.main()
    return code


def _end(signum: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)
