"""Where the command begins: before anything slow is imported, Ctrl-C ends it without a traceback.

SIGTERM and SIGHUP end it through its ``finally`` blocks, so that nothing half made stays behind; while there are ranks
or jobs to end, those who started them listen instead.
"""

from __future__ import annotations

import os
import signal
from importlib import import_module
from types import FrameType

EXIT_INTERRUPTED = 130  # launcher.errors has the list; importing it is not needed yet


def main() -> int:
    """``fsdp-launch``. Returns the exit code; raises SystemExit where a signal ends it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
        program = import_module("launcher.cli")  # by name and now: a quarter of a second of Hydra
        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:  # somebody ignores Ctrl-C (nohup), or handles it
        program = import_module("launcher.cli")
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_DFL:  # not ignored (nohup)
            signal.signal(signum, _unwind)
    code: int = program.main()
    return code


def _unwind(signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_DFL)  # a second one does not wait
    raise SystemExit(128 + signum)


def _end(signum: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)
