"""``described``: a dataclass field that carries its own documentation and bounds."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

MISSING: Final = "???"  # OmegaConf's word for "the user must say"


def described(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field with a help text and, where they say something, bounds or choices.

    The annotation gives the type; bounds hold for every number, choices for every string, of the field.
    A mutable default is copied per instance.
    """
    metadata = {
        "help": help,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "below": below,
        "choices": choices,
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    if dataclasses.is_dataclass(default) and isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
