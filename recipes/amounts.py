"""Sizes as people read them. No torch here: the launcher says them, too."""

from __future__ import annotations


def memory(nbytes: float) -> str:
    """Binary units: ``375 MiB``, ``1.25 GiB``."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
