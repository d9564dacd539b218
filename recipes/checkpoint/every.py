"""``checkpoint.every`` as it is written: steps, or minutes. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass

EXPECTED = "steps (1000) or minutes (10min), or null"
_MINUTES = re.compile(r"(\d+(?:\.\d+)?) ?min")


@dataclass(frozen=True)
class Every:
    """One of both: after how many steps, or after how many seconds."""

    steps: int | None = None
    seconds: float | None = None


def every_of(text: str) -> Every:
    """Raises ValueError: what is wrong with the text."""
    if match := _MINUTES.fullmatch(text.strip()):
        seconds = 60 * float(match[1])
        if seconds <= 0:
            raise ValueError(f"'{text}' is no time at all")
        return Every(seconds=seconds)
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        raise ValueError(f"'{text}' is neither a number of steps nor minutes") from None
    if not (number.is_integer() and number >= 1):
        raise ValueError(f"'{text}' is no whole number of steps from 1 on")
    return Every(steps=int(number))
