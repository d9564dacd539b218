"""Sizes as people read them. No torch here: the launcher says them, too."""

from __future__ import annotations


def memory(nbytes: float) -> str:
    """Binary units: ``375 MiB``, ``1.25 GiB``."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def gb(nbytes: float) -> str:
    """Decimal units, three digits: ``74.6 GB``. What plans speak, as data sheets and the FSDP paper do."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= 0.9995 * size:  # 999.7 MB would be told as 1e+03
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
