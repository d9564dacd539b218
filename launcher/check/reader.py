"""The composed tree against the dataclasses: every key known, nothing missing, every value in its type."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any

from launcher.check.near import did_you_mean, near, near_keys
from launcher.check.values import BadValue, Limits, expected, is_readable, read, without_null
from launcher.errors import Problem
from launcher.schema import Config
from launcher.sources import Sources
from recipes.registry import DATA, MODELS, OPTIMIZERS, Registry
from recipes.schema import MISSING

KINDS: dict[str, Registry] = {"model": MODELS, "data": DATA, "optimizer": OPTIMIZERS}


@dataclass
class Reading:
    """What could be read.

    config: complete in shape; values that could not be read hold their default.
    problems: what is wrong.
    failed: keys without a trustworthy value; a rule that needs one of them has nothing to say.
    """

    config: Config
    problems: list[Problem] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


def read_tree(tree: dict[str, Any], sources: Sources, failed: set[str]) -> Reading:
    """Read the whole tree.

    Args:
        failed: keys that composing could not make sense of; they have been reported, so nothing is said below them.
    """
    reader = _Reader(sources, set(failed), schema_of(tree))
    config = reader.read_dataclass(Config, tree, "")
    return Reading(config, reader.problems, reader.failed)


def schema_of(tree: dict[str, Any]) -> dict[str, type]:
    """The dataclass of each group that has kinds, as the tree's ``kind`` says; left out where that is unknown."""
    schema = {}
    for group, registry in KINDS.items():
        node = tree.get(group)
        entry = registry.get(str(node.get("kind"))) if isinstance(node, dict) else None
        if entry is not None:
            schema[group] = entry.config
    return schema


def default_tree(cls: type, schema: dict[str, type], path: str = "") -> dict[str, Any]:
    """Every key of a dataclass with its default, as plain YAML values; what has none is ``???``."""
    tree: dict[str, Any] = {}
    for item in fields_of(cls):
        key = _join(path, item.name)
        nested = schema.get(key) or nested_dataclass(item.annotation)
        default = item.default()
        if nested is not None and default is not None:
            tree[item.name] = default_tree(nested, schema, key)
        elif dataclasses.is_dataclass(default) and not isinstance(default, type):
            tree[item.name] = dataclasses.asdict(default)
        else:
            tree[item.name] = default
    return tree


def known_keys(cls: type, schema: dict[str, type], path: str = "") -> list[str]:
    """Every dotted key, leaves only."""
    keys = []
    for item in fields_of(cls):
        key = _join(path, item.name)
        nested = schema.get(key) or nested_dataclass(item.annotation)
        keys.extend(known_keys(nested, schema, key) if nested is not None else [key])
    return keys


@dataclass(frozen=True)
class Item:
    """A field of a dataclass with its annotation resolved."""

    name: str
    annotation: Any
    field: dataclasses.Field[Any]

    def default(self) -> Any:
        if self.field.default_factory is not dataclasses.MISSING:
            return self.field.default_factory()
        return MISSING if self.field.default is dataclasses.MISSING else self.field.default

    @property
    def limits(self) -> Limits:
        return Limits.of(self.field.metadata)

    @property
    def help(self) -> str:
        return str(self.field.metadata.get("help", ""))


def fields_of(cls: type) -> list[Item]:
    hints = typing.get_type_hints(cls)
    return [Item(item.name, hints[item.name], item) for item in dataclasses.fields(cls) if item.init]


def nested_dataclass(annotation: Any) -> type | None:
    """The dataclass of ``D`` or ``D | None``; None for everything else."""
    inner = without_null(annotation)
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


class _Reader:
    def __init__(self, sources: Sources, failed: set[str], schema: dict[str, type]) -> None:
        self.sources = sources
        self.failed = failed
        self.schema = schema
        self.problems: list[Problem] = []
        self._known: list[str] | None = None

    def read_dataclass(self, cls: type, tree: dict[str, Any], path: str) -> Any:
        """An instance of ``cls``; where a value failed, its default stands in."""
        items = fields_of(cls)
        self._refuse_unknown(items, tree, path)
        values = {item.name: self._read_field(item, tree, _join(path, item.name)) for item in items}
        if any(_is_below(failed, path) for failed in self.failed):
            return _unchecked(cls, values)
        try:
            return cls(**values)
        except Exception as error:  # a plugin's own __post_init__ may raise anything
            self._problem(path, f"{cls.__name__} refuses these values: {error}", remedy="change the values it names")
            return _unchecked(cls, values)

    def _read_field(self, item: Item, tree: dict[str, Any], key: str) -> Any:
        value = tree.get(item.name, item.default())
        if key in self.failed:
            return item.default()
        if key in KINDS:
            return self._read_kind(key, value)
        if isinstance(value, str) and value == MISSING:
            return self._missing(item, key)
        nested = nested_dataclass(item.annotation)
        if nested is None:
            return self._read_value(item, value, key)
        if dataclasses.is_dataclass(value):
            value = dataclasses.asdict(value)  # type: ignore[arg-type]
        if value is None and without_null(item.annotation) is not item.annotation:
            return None
        if not isinstance(value, dict):
            self._problem(key, "this is a group of keys, not one value", as_yaml(value), remedy=_members(key, nested))
            return item.default()
        return self.read_dataclass(nested, value, key)

    def _read_kind(self, key: str, value: Any) -> Any:
        """A group whose dataclass depends on its ``kind``."""
        registry = KINDS[key]
        kind = value.get("kind", MISSING) if isinstance(value, dict) else value
        if not isinstance(value, dict) or kind == MISSING:
            self._problem(
                key,
                f"no {key} is chosen",
                got=None if isinstance(value, dict) else as_yaml(value),
                expected=f"a preset of the group, or {key}.kind: one of {', '.join(registry.names())}",
                remedy=f"{key}=NAME (fsdp-launch --help lists the names)",
            )
            return None
        entry = registry.get(str(kind))
        if entry is None:
            self._problem(
                f"{key}.kind",
                f"there is no {key} kind of this name",
                got=as_yaml(kind),
                expected=f"one of {', '.join(registry.names())}",
                remedy=did_you_mean(near(str(kind), registry.names()))
                or "a kind of your own comes from a file: plugins='[./my_file.py]'",
            )
            self.failed.add(key)
            return None
        return self.read_dataclass(entry.config, value, key)

    def _read_value(self, item: Item, value: Any, key: str) -> Any:
        if not is_readable(item.annotation):
            self._problem(key, f"{item.annotation} cannot be read from YAML", remedy=READABLE)
            return item.default()
        typed = self.sources.text(key)
        try:
            return read(item.annotation, value, item.limits, lambda below: self.sources.text(_join(key, below)))
        except BadValue as bad:
            self._bad_value(item, value, key, typed, bad.hint)
            return item.default()

    def _bad_value(self, item: Item, value: Any, key: str, typed: str | None, hint: str) -> None:
        what = "the value does not fit"
        limits = item.limits
        remedy = hint
        if typed == "":
            what, remedy = "there is nothing after the =", f"write {key}=VALUE without spaces around the ="
        elif limits.choices and isinstance(value, str):
            remedy = did_you_mean(near(value, limits.choices)) or hint
        remedy = remedy.replace("KEY=", f"{key}=") or HINTS.get(key, "")
        words = expected(item.annotation, limits)
        self._problem(key, what, got=as_yaml(value), expected=f"{words}{_aside(item.help)}", remedy=remedy)

    def _missing(self, item: Item, key: str) -> Any:
        words = expected(item.annotation, item.limits) if is_readable(item.annotation) else "a value"
        self._problem(
            key, "a value is needed", expected=f"{words}{_aside(item.help)}", remedy=f"{key}=VALUE on the command line"
        )
        return None

    def _refuse_unknown(self, items: list[Item], tree: dict[str, Any], path: str) -> None:
        names = {item.name for item in items}
        for name, value in tree.items():
            key = _join(path, str(name))
            if name in names or key in self.failed:
                continue
            for leaf in _leaves(key, value):
                matches = near_keys(leaf, self._all_keys())
                self._problem(
                    leaf,
                    "there is no such key" + self._other_kinds(leaf),
                    got=None if self.sources.text(leaf) is not None else as_yaml(_value_at(value, leaf, key)),
                    expected="" if matches else f"one of {', '.join(sorted(names))}",
                    remedy=did_you_mean(matches) or self._remedy_for(leaf, names),
                )

    def _remedy_for(self, leaf: str, names: set[str]) -> str:
        """A key that is like no other: perhaps its group is misspelt, or it stands below a group by mistake."""
        first, _, rest = leaf.partition(".")
        if first == "experiment" and rest:
            return f"an experiment file begins with '# @package _global_'; then {rest} means the key of that name"
        return did_you_mean([f"{match}=..." for match in near(first, names)]) or "remove it"

    def _other_kinds(self, key: str) -> str:
        """Names the kinds that do have such a key: the user may have chosen another preset than they think."""
        group, _, rest = key.partition(".")
        if group not in KINDS or group not in self.schema:
            return ""
        entries = [KINDS[group][name] for name in KINDS[group].names()]
        having = [entry.name for entry in entries if rest in {item.name for item in fields_of(entry.config)}]
        chosen = next((entry.name for entry in entries if entry.config is self.schema[group]), "")
        return f" for {group} kind {chosen} (it belongs to {', '.join(having)})" if having else ""

    def _all_keys(self) -> list[str]:
        if self._known is None:
            self._known = known_keys(Config, self.schema)
        return self._known

    def _problem(self, key: str, what: str, got: str | None = None, expected: str = "", remedy: str = "") -> None:
        self.failed.add(key)
        self.problems.append(Problem(what, key, got, self.sources.of(key), expected, remedy))


HINTS = {
    "rate_limiter.max_inflight": "rate_limiter=unlimited switches the limiter off",
    "cluster.nproc_per_node": "1 trains in a single process",
    "data.eval_fraction": "0 holds nothing out; then set train.eval_samples=0 too",
    "train.micro_batch": "null: no accumulation",
    "train.clip_norm": "null: no clipping",
    "sharding.factor": "sharding=replicate is F = 1, sharding=full is F = W",
}
READABLE = "use int, float, bool, str, Literal of texts, list[...], dict[str, ...], a dataclass, or any of these | None"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _is_below(key: str, path: str) -> bool:
    return not path or key == path or key.startswith(path + ".")


def _leaves(key: str, value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [leaf for name, below in value.items() for leaf in _leaves(_join(key, str(name)), below)]
    return [key]


def _value_at(value: Any, leaf: str, key: str) -> Any:
    for part in leaf.removeprefix(key).split("."):
        if part:
            value = value[part]
    return value


def _members(key: str, cls: type) -> str:
    return f"set its keys: {', '.join(f'{key}.{item.name}' for item in fields_of(cls)[:4])}, ..."


def _aside(help_text: str) -> str:
    return f" ({help_text})" if help_text else ""


def as_yaml(value: Any) -> str:
    """The value as the user would write it on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"'{value}'"
    if isinstance(value, list):
        return "[" + ", ".join(as_yaml(element) for element in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {as_yaml(element)}" for name, element in value.items()) + "}"
    return "null" if value is None else str(value)


def _unchecked(cls: type, values: dict[str, Any]) -> Any:
    """An instance without ``__init__``: some values are stand-ins that a plugin's own checks must not see."""
    instance: Any = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance
