"""One error family. Every error says what happened, where, what was expected, what was found and what to do."""

from __future__ import annotations

from typing import Any


class EngineError(RuntimeError):
    """Base of every error the engine raises on purpose.

    Args:
        what: one sentence, in the user's words.
        unit: name of the unit (its fully qualified name, ``<root>`` for the root), if one is concerned.
        parameter: fully qualified name of the original parameter, if one is concerned.
        expected, got: the two sides of the contradiction, if there is one.
        remedy: what the user can do.
    """

    def __init__(
        self,
        what: str,
        *,
        unit: str | None = None,
        parameter: str | None = None,
        expected: object = None,
        got: object = None,
        remedy: str | None = None,
    ) -> None:
        self.what, self.unit, self.parameter = what, unit, parameter
        self.expected, self.got, self.remedy = expected, got, remedy
        super().__init__(self._render())

    def _render(self) -> str:
        lines = [self.what]
        if self.unit is not None:
            lines.append(f"  unit: {self.unit}")
        if self.parameter is not None:
            lines.append(f"  parameter: {self.parameter}")
        if self.expected is not None or self.got is not None:
            lines.append(f"  expected: {self.expected}")
            lines.append(f"  got: {self.got}")
        if self.remedy is not None:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:  # keyword-only fields survive pickling between processes
        fields = (self.what, self.unit, self.parameter, self.expected, self.got, self.remedy)
        return _rebuild, (type(self), fields)


def _rebuild(kind: type[EngineError], fields: tuple) -> EngineError:
    what, unit, parameter, expected, got, remedy = fields
    return kind(what, unit=unit, parameter=parameter, expected=expected, got=got, remedy=remedy)


class WrapError(EngineError, ValueError):
    """The model cannot be sharded as asked (found while wrapping, before anything runs)."""


class StateError(EngineError):
    """A unit was asked for something its present state does not allow."""


class MismatchError(EngineError):
    """Ranks disagree: on structure, on order of collectives, or on the number of iterations."""


class NumericsError(EngineError):
    """A number is not finite, or an optimizer cannot be exact on shards."""


class WireError(EngineError):
    """A collective failed, timed out, or met the wrong peer."""


class InitError(EngineError):
    """Deferred initialisation met something it cannot replay."""
