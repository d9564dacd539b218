"""Where a value came from: the override as typed, or the preset's file. Asked only when something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Layer:
    """One composed file.

    where: the file's path, or a plugin's.
    tree: its keys, nested as they land in the whole config.
    """

    where: str
    tree: dict[str, Any]


@dataclass(frozen=True)
class Typed:
    """One override: the key it sets, and the argument as typed."""

    key: str
    argument: str

    @property
    def text(self) -> str:
        """The part after the first ``=``."""
        return self.argument.partition("=")[2]


class Sources:
    """Looks a key up in the overrides, last first, then in the files, last first."""

    def __init__(
        self,
        overrides: Sequence[Typed] = (),
        layers: Callable[[], Sequence[Layer]] = tuple,
        environment: dict[str, str] | None = None,
    ) -> None:
        """``layers`` is called at most once, when a file has to be named. ``environment``: keys that variables set."""
        self._overrides = tuple(overrides)
        self._load_layers = layers
        self._layers: Sequence[Layer] | None = None
        self._environment = environment or {}

    def under(self, layer: Layer) -> Sources:
        """With one more layer: below what was typed, above every file so far."""
        return Sources(self._overrides, lambda: (*self._load_layers(), layer), self._environment)

    def of(self, key: str) -> str:
        """Words for people; empty for a default that nobody wrote anywhere."""
        if key in self._environment:
            return self._environment[key]
        if typed := self.override(key):
            return f"command line: {typed.argument}"
        layer = self._layer(key)
        return layer.where if layer else ""

    def override(self, key: str) -> Typed | None:
        """The last override that set ``key``, something above it or something below it."""
        for typed in reversed(self._overrides):
            if typed.key == key or key.startswith(typed.key + ".") or typed.key.startswith(key + "."):
                return typed
        return None

    def text(self, key: str) -> str | None:
        """What was typed after ``key=``, if exactly this key was typed."""
        for typed in reversed(self._overrides):
            if typed.key == key:
                return typed.text
        return None

    def is_typed(self, key: str) -> bool:
        return self.override(key) is not None

    def is_in_file(self, key: str) -> bool:
        """Whether a composed file sets the key."""
        return self._layer(key) is not None

    def _layer(self, key: str) -> Layer | None:
        if self._layers is None:
            self._layers = self._load_layers()
        parts = key.split(".")
        for layer in reversed(self._layers):
            if _holds(layer.tree, parts):
                return layer
        return None


def stored(path: Path, tree: dict[str, Any]) -> Sources:
    """Sources of a config that was read back from one file."""
    return Sources(layers=lambda: (Layer(str(path), tree),))


def shown(path: Path) -> str:
    """A path as short as it is clear: relative below the current folder, else whole."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _holds(tree: Any, parts: list[str]) -> bool:
    for part in parts:
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True
