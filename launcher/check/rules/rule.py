"""A cross-field rule: a generator of problems, and the keys it reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from launcher.check.about import About
from launcher.errors import Problem
from launcher.schema import Config

Check = Callable[[Config, About], Iterator[Problem]]


@dataclass(frozen=True)
class Rule:
    """keys: config keys (or whole groups) that must have been read for the rule to have something to say."""

    keys: tuple[str, ...]
    check: Check

    def applies(self, failed: Collection[str]) -> bool:
        return not any(_touch(key, bad) for key in self.keys for bad in failed)


class Rules(list[Rule]):
    """One subject's rules, in the order in which they are told."""

    def reading(self, *keys: str) -> Callable[[Check], Check]:
        """Decorator: ``check`` reads these keys."""

        def add(check: Check) -> Check:
            self.append(Rule(keys, check))
            return check

        return add


def _touch(key: str, other: str) -> bool:
    return key == other or key.startswith(other + ".") or other.startswith(key + ".")
