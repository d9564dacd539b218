"""``Family``: how one kind of model lies in a folder. Names, shapes and ``config.json`` only; no torch here."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]  # of our tensors, by our names


@dataclass(frozen=True)
class Place:
    """Where one of our tensors lies. name: in the folder. is_transposed: a matrix whose rows are our columns."""

    name: str
    is_transposed: bool = False

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        return ours[::-1] if self.is_transposed else ours


@dataclass(frozen=True)
class SpecialIds:
    """Tokens that ``config.json`` names; None where the data has none."""

    pad: int | None = None
    eos: int | None = None


class Family(abc.ABC):
    """One model, by its config. note: for people, when a folder of it has been written."""

    note: str = ""

    @abc.abstractmethod
    def place(self, name: str) -> Place | None:
        """None: not in the folder, because another name holds the same values (tied weights)."""

    @abc.abstractmethod
    def config(self, shapes: Shapes, special: SpecialIds) -> dict[str, Any]:
        """``config.json``."""

    def differences(self, config: Mapping[str, Any]) -> list[tuple[str, object, object]]:
        """(our key, what the folder has, what ours is) where the folder's ``config.json`` tells of another model."""
        return []

    def generation(self, special: SpecialIds) -> dict[str, Any] | None:
        """``generation_config.json``; None for models that write no text."""
        return None

    def is_ignorable(self, name: str) -> bool:
        """Whether the folder's tensor ``name`` may be left unread: constants, and second copies of tied weights."""
        return False

    def found(self, place: Place, names: Collection[str]) -> Place:
        """The place as this folder spells it."""
        return place


def size_differences(
    config: Mapping[str, Any], model: object, keys: Mapping[str, str]
) -> list[tuple[str, object, object]]:
    """keys: from the folder's words to ours. What either side leaves open is no difference."""
    pairs = [(ours, config.get(theirs), getattr(model, ours)) for theirs, ours in keys.items()]
    return [
        (f"model.{ours}", there, here) for ours, there, here in pairs if None not in (there, here) and there != here
    ]


def known(**values: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in values.items() if value is not None}
