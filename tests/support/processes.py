"""Looking at processes from outside: wait for a condition, find what a run has left behind."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0, every_s: float = 0.02) -> None:
    """Returns when ``condition`` holds; fails the test if it does not within a limit that only a hang reaches."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"waited {limit_s:g} s in vain"
        time.sleep(every_s)


def with_argument(text: str) -> list[int]:
    """Ids of living processes that have ``text`` in their command line (zombies are not living)."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(
            text in word for word in process.info["cmdline"] or []
        ):
            found.append(process.info["pid"])
    return found


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
