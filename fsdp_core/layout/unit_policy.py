"""Which modules become units. A policy reads names, classes and sizes; it touches no tensor."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_core.errors import WrapError


@dataclass(frozen=True)
class ModuleFacts:
    """What a policy may know about one module of the tree (listed in the order of ``named_modules``)."""

    fqn: str
    module: Any
    own_numel: int  # elements of the parameters it holds directly
    tree_numel: int  # elements of its whole subtree, each parameter once


class UnitPolicy(abc.ABC):
    """Chooses units below the root, which always is one."""

    @abc.abstractmethod
    def choose(self, facts: Sequence[ModuleFacts]) -> list[tuple[Any, ...]]:
        """Groups of modules; each group becomes one unit. Most groups hold one module."""


@dataclass(frozen=True)
class ModuleClassPolicy(UnitPolicy):
    """Every instance of one of ``classes`` (named by class or by class name)."""

    classes: tuple[type | str, ...]

    def choose(self, facts: Sequence[ModuleFacts]) -> list[tuple[Any, ...]]:
        names = {c for c in self.classes if isinstance(c, str)}
        types = tuple(c for c in self.classes if isinstance(c, type))
        chosen = [f for f in facts if f.fqn and (isinstance(f.module, types) or type(f.module).__name__ in names)]
        found = {type(f.module).__name__ for f in facts}
        for wanted in self.classes:
            if isinstance(wanted, str) and wanted not in found:
                raise WrapError(
                    "No module has the class that was chosen for units.",
                    expected=f"one of {sorted(found)}",
                    got=wanted,
                    remedy="name a class that occurs in the model",
                )
        return [(f.module,) for f in chosen]


@dataclass(frozen=True)
class PredicatePolicy(UnitPolicy):
    """Every module for which ``predicate(fqn, module)`` is true."""

    predicate: Callable[[str, Any], bool]

    def choose(self, facts: Sequence[ModuleFacts]) -> list[tuple[Any, ...]]:
        return [(f.module,) for f in facts if f.fqn and self.predicate(f.fqn, f.module)]


@dataclass(frozen=True)
class SizePolicy(UnitPolicy):
    """Bottom up: a module becomes a unit once its not yet assigned parameters reach ``min_numel`` elements.

    Containers without a forward cannot be units; what they hold is left to the module above.
    """

    min_numel: int

    def __post_init__(self) -> None:
        if self.min_numel < 1:
            raise WrapError(
                "The size of units must be a number of elements.", expected="at least 1", got=self.min_numel
            )

    def choose(self, facts: Sequence[ModuleFacts]) -> list[tuple[Any, ...]]:
        left = {f.fqn: f.own_numel for f in facts}
        chosen = []
        for fact in reversed(facts):
            if not fact.fqn:
                continue
            if left[fact.fqn] >= self.min_numel and has_forward(fact.module):
                chosen.append((fact.module,))
                continue
            parent = fact.fqn.rpartition(".")[0]
            left[parent] += left[fact.fqn]
        return list(reversed(chosen))


@dataclass(frozen=True)
class GroupPolicy(UnitPolicy):
    """Explicit groups: modules of one group form one unit though they are not neighbours (paper Fig. 1)."""

    groups: tuple[tuple[Any, ...], ...]

    def choose(self, facts: Sequence[ModuleFacts]) -> list[tuple[Any, ...]]:
        return list(self.groups)


def has_forward(module: Any) -> bool:
    """False for containers such as ``ModuleList`` that define no forward."""
    forward = getattr(type(module), "forward", None)
    return forward is not None and forward.__name__ != "_forward_unimplemented"


def regroup_by_order(order: Iterable[tuple[Any, int]], target_numel: int) -> GroupPolicy:
    """Merge small units that ran one after another until a group holds ``target_numel`` elements.

    Args:
        order: (module, number of elements) in the order observed in a first iteration.
        target_numel: a group is closed once it has at least this many elements.
    """
    groups: list[tuple[Any, ...]] = []
    current: list[Any] = []
    numel = 0
    for module, size in order:
        current.append(module)
        numel += size
        if numel >= target_numel:
            groups.append(tuple(current))
            current, numel = [], 0
    if current:
        groups.append(tuple(current))
    return GroupPolicy(tuple(groups))


def as_policy(units: Any) -> UnitPolicy | None:
    """Accept every form of the ``units`` argument of ``fully_shard``.

    ``None``: no units below the root. A policy: itself. A class, or classes or class names: by class. A callable
    ``(fqn, module)``: by predicate. An integer: by size. Modules, or tuples of modules: explicit groups.
    """
    if units is None or isinstance(units, UnitPolicy):
        return units
    if isinstance(units, bool):
        raise WrapError(
            "`units` must not be a boolean.", expected="classes, modules, a predicate or a policy", got=units
        )
    if isinstance(units, int):
        return SizePolicy(units)
    if isinstance(units, (type, str)):
        return ModuleClassPolicy((units,))
    if has_forward(units) and not isinstance(units, Iterable):  # one module
        return GroupPolicy(((units,),))
    if isinstance(units, Iterable):
        items = tuple(units)
        if all(isinstance(item, (type, str)) for item in items):
            return ModuleClassPolicy(items) if items else None
        return GroupPolicy(tuple(tuple(item) if isinstance(item, (tuple, list)) else (item,) for item in items))
    if callable(units):
        return PredicatePolicy(units)
    raise WrapError(
        "`units` has a form that is not understood.",
        expected="None, a policy, classes, class names, modules, groups of modules, a predicate or a size",
        got=type(units).__name__,
    )
