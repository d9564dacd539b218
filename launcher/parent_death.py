"""A rank must not outlive its launcher, however the launcher ends, SIGKILL included."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PARENT_PID_VARIABLE = "FSDP_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1  # from Linux's prctl.h
_POLL_S = 1.0


def die_with_launcher() -> None:
    """Called first thing in a rank that a launcher started; does nothing in a rank without one (torchrun).

    On Linux the kernel sends SIGKILL when the launcher's thread that started this process ends. Elsewhere a thread
    asks for the parent's id every second.
    """
    text = os.environ.pop(PARENT_PID_VARIABLE, None)
    if text is None:
        return
    launcher_pid = int(text)
    if not _ask_kernel():
        threading.Thread(target=_watch, args=(launcher_pid,), name="launcher-watch", daemon=True).start()
    if os.getppid() != launcher_pid:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _ask_kernel() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0


def _watch(launcher_pid: int) -> None:
    while os.getppid() == launcher_pid:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
