"""``DataError``: a problem with the user's data, told in the user's words. No torch here."""

from __future__ import annotations


class DataError(ValueError):
    """Something about the data must be changed by the user.

    The message names the file (and line) or the config key, what was expected, what was found, and a remedy.
    """


def listed(names: list[str], at_most: int = 12) -> str:
    """``a, b, c and 3 more``: names in a message that stays readable."""
    shown = ", ".join(names[:at_most])
    rest = len(names) - at_most
    return shown + (f" and {rest} more" if rest > 0 else "") if names else "none"
