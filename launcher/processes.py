"""What the kernel says about a process of this host, in one word. Linux; elsewhere only whether it is there."""

from __future__ import annotations

import os
from pathlib import Path

from recipes.flight.report import GONE, RUNNING, STOPPED

_WORDS = {
    "R": RUNNING,
    "S": "sleeping",
    "D": "waiting for a disk",
    "I": "idle",
    "T": STOPPED,
    "t": "stopped by a debugger",
    "Z": GONE,
    "X": GONE,
}


def state_of(pid: int, proc: Path = Path("/proc")) -> str:
    """``running`` (on a core), ``sleeping`` (waiting for something), ``stopped`` (SIGSTOP), ``gone``, ..."""
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
    except FileNotFoundError:
        return GONE if proc.joinpath("self").exists() or not _is_there(pid) else RUNNING
    except OSError:
        return RUNNING
    letter = text.rpartition(")")[2].split()[0]  # behind the command's name, which may hold anything
    return _WORDS.get(letter, letter)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
