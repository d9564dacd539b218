"""One YAML value against one annotation: int, float, bool, str, list, dict with text keys, a choice, or null."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

TRUE = ("true", "yes", "on")
FALSE = ("false", "no", "off")
Typed = Callable[[str], str | None]  # a key below this value ("" is itself) -> its text on the command line
SCALARS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class BadValue(Exception):
    """The value does not fit. ``hint`` says what to do about it, where that is not plain from what is expected."""

    def __init__(self, hint: str = "") -> None:
        super().__init__(hint)
        self.hint = hint


@dataclass(frozen=True)
class Limits:
    """Bounds of every number, choices of every text, of one field; from ``described``."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] | None = None

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Limits:
        return cls(**{name: metadata.get(name) for name in cls.__dataclass_fields__})

    def allow(self, number: float) -> bool:
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def text(self) -> str:
        """``, at least 0, below 1``"""
        words = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most), ("below", self.below))
        return "".join(f", {word} {bound:g}" for word, bound in words if bound is not None)


def is_readable(annotation: Any) -> bool:
    """Whether ``read`` knows this annotation (dataclasses are the reader's, not ours)."""
    if annotation in SCALARS:
        return True
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return len(arguments) == 1 and is_readable(arguments[0])
    if origin is dict:
        return len(arguments) == 2 and arguments[0] is str and is_readable(arguments[1])
    if origin is Literal:
        return all(isinstance(choice, str) for choice in arguments)
    inner = without_null(annotation)
    return inner is not annotation and is_readable(inner)


def without_null(annotation: Any) -> Any:
    """``X`` of ``X | None``; any other annotation as it is."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        rest = [argument for argument in typing.get_args(annotation) if argument is not type(None)]
        if len(rest) == 1 and len(typing.get_args(annotation)) == 2:
            return rest[0]
    return annotation


def expected(annotation: Any, limits: Limits) -> str:
    """The annotation in words: ``a whole number, at least 1, or null``."""
    inner = without_null(annotation)
    if inner is not annotation:
        return f"{expected(inner, limits)}, or null"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return f"a list, each {expected(arguments[0], limits)}"
    if origin is dict:
        return f"a map of names, each {expected(arguments[1], limits)}"
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if annotation is str and limits.choices:
        return f"one of {', '.join(limits.choices)}"
    return SCALARS[annotation] + (limits.text() if annotation in (int, float) else "")


def read(annotation: Any, value: Any, limits: Limits, typed: Typed = lambda _: None) -> Any:
    """The value in the annotation's type.

    Args:
        typed: text as typed on the command line, if it was: a text field keeps ``1e3`` as written.

    Raises:
        BadValue: it does not fit.
    """
    inner = without_null(annotation)
    if inner is not annotation:
        return None if value is None else read(inner, value, limits, typed)
    if value is None:
        raise BadValue("null is not allowed here")
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return _read_list(arguments[0], value, limits)
    if origin is dict:
        return _read_dict(arguments[1], value, limits, typed)
    if origin is Literal:
        return _read_text(value, Limits(choices=arguments), typed(""))
    if annotation is int:
        return _read_int(value, limits)
    if annotation is float:
        return _within(_number(value), limits)
    if annotation is bool:
        return _read_bool(value)
    return _read_text(value, limits, typed(""))


def _read_int(value: Any, limits: Limits) -> int:
    """Whole numbers however written: 1000, 1e3, 1_000, or text of these (as an environment variable gives it)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int(_within(value, limits))
    if isinstance(value, str):
        try:
            return int(_within(int(value), limits))
        except ValueError:
            pass  # perhaps 1e3: a float in spelling, a whole number in value
    number = _number(value)
    if not number.is_integer():
        raise BadValue("it has a fraction")
    return int(_within(int(number), limits))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise BadValue()
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise BadValue() from None
    if not math.isfinite(number):
        raise BadValue("it is not finite")
    return number


def _within(number: float, limits: Limits) -> float:
    if not limits.allow(number):
        raise BadValue()
    return number


def _read_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in TRUE + FALSE:
        return value.lower() in TRUE
    if value in (0, 1):
        raise BadValue(f"write {'true' if value else 'false'}")
    raise BadValue()


def _read_text(value: Any, limits: Limits, typed: str | None) -> str:
    if isinstance(value, (bool, float)) and typed is None:
        raise BadValue("YAML read it as something else than text; put it in quotes")
    if isinstance(value, (bool, int, float)):
        value = typed if typed is not None else str(value)
    if not isinstance(value, str):
        raise BadValue()
    if "\0" in value:
        raise BadValue("no path, name or variable may hold a NUL character")
    if any("\ud800" <= letter <= "\udfff" for letter in value):  # Python's stand-in for a byte it cannot read
        raise BadValue("it holds bytes that are no UTF-8 text; rename what it names")
    if limits.choices and value not in limits.choices:
        raise BadValue()
    return value


def _read_list(annotation: Any, value: Any, limits: Limits) -> list[Any]:
    if isinstance(value, (str, int, float)):
        inner = value.strip().removeprefix("(").removesuffix(")") if isinstance(value, str) else value
        raise BadValue(f"put it in brackets, quoted for the shell: 'KEY=[{inner}]'")
    if not isinstance(value, list):
        raise BadValue()
    return [read(annotation, element, limits) for element in value]


def _typed_below(typed: Typed, name: str, below: str) -> str | None:
    return typed(f"{name}.{below}" if below else name)


def _read_dict(annotation: Any, value: Any, limits: Limits, typed: Typed) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadValue()
    elements = {}
    for key, element in value.items():
        elements[str(key)] = read(annotation, element, limits, functools.partial(_typed_below, typed, str(key)))
    return elements
