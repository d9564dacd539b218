"""One reading of ``cluster.time_limit``, quoted or not, from YAML or the command line."""

from __future__ import annotations

import re

EXPECTED = "seconds (7200), MM:SS, HH:MM:SS (24:00:00), D-HH:MM:SS (1-12:00:00), or D-HH"
_WITH_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")
_WITHOUT_DAYS = re.compile(r"(?:(\d+):)?(\d+):(\d+)")


def seconds_of(value: str | int) -> int:
    """The limit in seconds.

    YAML 1.1 reads an unquoted ``24:00:00`` as the base-60 number 86400, which is the same number of seconds.

    Raises:
        ValueError: what is wrong with the text.
    """
    if isinstance(value, int):
        return _positive(value, str(value))
    text = value.strip()
    if text.isdecimal():
        return _positive(int(text), text)
    if match := _WITH_DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        if hours > 23:
            raise ValueError(f"'{text}' has {hours} hours beside its days; at most 23")
    elif match := _WITHOUT_DAYS.fullmatch(text):
        days, (hours, minutes, seconds) = 0, (int(part or 0) for part in match.groups())
    else:
        raise ValueError(f"'{text}' is no time limit")
    if seconds > 59 or (minutes > 59 and (days or hours)):
        raise ValueError(f"'{text}' has a part above 59 minutes or seconds")
    return _positive(((days * 24 + hours) * 60 + minutes) * 60 + seconds, text)


def canonical(seconds: int) -> str:
    """``HH:MM:SS``, with days in front from 24 hours on: ``1-12:00:00``."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02d}:{minute:02d}:{second:02d}"
    return f"{days}-{clock}" if days else clock


def _positive(seconds: int, text: str) -> int:
    if seconds < 1:
        raise ValueError(f"'{text}' is no time at all")
    return seconds
