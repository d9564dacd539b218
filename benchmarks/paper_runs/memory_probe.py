"""What this process really holds. With ``settle`` every block of 64 KB or more comes from the system and goes back to
it at once, so that resident memory follows what is allocated."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_libc = ctypes.CDLL(None)


def settle() -> None:
    """From now on; glibc only."""
    _libc.mallopt(_M_ARENA_MAX, 1)
    _libc.mallopt(_M_MMAP_THRESHOLD, 64 << 10)
    _libc.mallopt(_M_TRIM_THRESHOLD, 0)


def resident_bytes() -> int:
    gc.collect()
    _libc.malloc_trim(0)
    return _status("VmRSS")


def forget_peak() -> None:
    """``peak_bytes`` begins anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most resident memory since ``forget_peak``."""
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")
