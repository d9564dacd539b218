"""From tree to ``Config``: read against the dataclasses, then the cross-field rules."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from launcher import time_limit
from launcher.check.about import About
from launcher.check.reader import Reading, read_tree
from launcher.check.rules import RULES
from launcher.errors import ConfigErrors
from launcher.schema import Config
from launcher.sources import Sources


def read_config(tree: dict[str, Any], sources: Sources | None = None, about: About | None = None) -> Config:
    """The typed config of a composed (or stored) tree of plain YAML values.

    Keys that the tree leaves out have their default; ``cluster.time_limit`` is in its canonical spelling afterwards.

    Raises:
        ConfigErrors: every problem, in one exception.
    """
    if about is None:
        about = About(sources=sources or Sources())
    reading = check_tree(tree, about)
    if reading.problems:
        raise ConfigErrors(reading.problems)
    return reading.config


def check_tree(tree: dict[str, Any], about: About, failed: Collection[str] = ()) -> Reading:
    """Like ``read_config``, without raising. ``failed``: keys whose problems have been told already."""
    reading = read_tree(tree, about.sources, set(failed))
    for rule in RULES:
        if rule.applies(reading.failed):
            reading.problems.extend(rule.check(reading.config, about))
    limit = reading.config.cluster.time_limit
    if limit is not None and not reading.problems:
        reading.config.cluster.time_limit = time_limit.canonical(time_limit.seconds_of(limit))
    return reading
