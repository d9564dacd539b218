"""The checked config as a YAML file and back. A rank reads it through the same checker, without Hydra."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher.check import About, read_config
from launcher.errors import ConfigErrors, Problem
from launcher.plugins import load_plugins
from launcher.schema import Config
from launcher.sources import stored


def to_tree(config: Config) -> dict[str, Any]:
    """Every key with its value, plain; ``plugins`` left out, as code is never named by a stored config."""
    tree = dataclasses.asdict(config)
    del tree["plugins"]
    return tree


def to_yaml(config: Config) -> str:
    """The whole config, keys in the schema's order; ``from_yaml`` gives an equal ``Config`` (plugins aside)."""
    return yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True, width=120)


def from_yaml(path: str | Path, plugins: Sequence[str | Path] = ()) -> Config:
    """Read a stored config back and check it again.

    Args:
        plugins: the user's files, named by whoever starts the process; imported first.

    Raises:
        ConfigErrors: the file cannot be read, or does not pass the check.
    """
    path = Path(path)
    files = load_plugins(plugins)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigErrors([Problem(f"the stored config cannot be read: {error}", source=str(path))]) from None
    if not isinstance(tree, dict):
        raise ConfigErrors([Problem("the stored config is no map of keys", source=str(path))])
    config = read_config(tree, about=About(sources=stored(path, tree), is_typed=False))
    config.plugins = [str(file) for file in files]
    return config
