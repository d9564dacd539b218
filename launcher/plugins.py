"""A user's own models, data and optimizers: Python files named on the command line, imported before composing.

Never taken from a stored config: reading a config must not run code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path

from launcher.check.reader import KINDS, READABLE, default_tree, fields_of, nested_dataclass
from launcher.check.values import is_readable
from launcher.errors import ConfigErrors, Problem
from launcher.sources import shown
from recipes.data.files import expanded
from recipes.registry import Entry
from recipes.schema.data import DataConfig
from recipes.schema.model import ModelConfig
from recipes.schema.training import OptimizerConfig

BASES: dict[str, type] = {"model": ModelConfig, "data": DataConfig, "optimizer": OptimizerConfig}
NEEDED = {
    "model": ("build", "build(config, info) -> torch.nn.Module"),
    "data": ("prepare", "prepare(config, request) -> Splits"),
    "optimizer": ("build", "build(config, groups) -> torch.optim.Optimizer"),
}
_loaded: dict[Path, list[tuple[str, str]]] = {}  # file -> (group, name) of what it registered


def load_plugins(paths: Sequence[str | Path]) -> list[Path]:
    """Import each file once and return the absolute paths.

    Raises:
        ConfigErrors: a file is missing, does not import, registers nothing, or registers something unusable; the
            message holds the user's own line.
    """
    files = [expanded(str(path)).absolute() for path in paths]
    for typed, file in zip(paths, files, strict=True):
        if file not in _loaded:
            _load(file, str(typed))
    return files


def unload_plugins() -> None:
    """Forget every plugin (tests, and programs that compose several times)."""
    for registered in _loaded.values():
        for group, name in registered:
            KINDS[group].discard(name)
    _loaded.clear()


def plugin_presets() -> list[tuple[str, str, dict[str, object], str]]:
    """(group, preset name, tree of defaults, file) of everything that plugins registered."""
    presets = []
    for file, registered in _loaded.items():
        for group, name in registered:
            entry = KINDS[group][name]
            presets.append((group, name, {**default_tree(entry.config, {}), "kind": name}, shown(file)))
    return presets


def _load(file: Path, typed: str) -> None:
    if not file.is_file() or file.suffix != ".py":
        raise ConfigErrors(
            [
                Problem(
                    "this is no Python file" if file.exists() else "there is no such file",
                    "plugins",
                    f"'{typed}' (looked for {file})",
                    "command line",
                    "a .py file that registers a model, data or an optimizer",
                    "plugins='[./my_model.py]'",
                )
            ]
        )
    before = {group: set(registry.names()) for group, registry in KINDS.items()}
    try:
        _import(file)
        registered = _new_entries(before)
        problems = _problems(file, registered)
    except Exception as error:  # whatever the user's file raises
        problems, registered = [_import_problem(file, error)], _new_entries(before)
    if problems:
        for group, name in registered:
            KINDS[group].discard(name)
        raise ConfigErrors(problems)
    _loaded[file] = registered


def _new_entries(before: dict[str, set[str]]) -> list[tuple[str, str]]:
    return [
        (group, name) for group, registry in KINDS.items() for name in registry.names() if name not in before[group]
    ]


def _import(file: Path) -> None:
    """Under a name of its own, so that two files called model.py do not meet."""
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"fsdp_launch_plugin_{file.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up while they are made
    writes_bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # a check leaves nothing behind, no __pycache__ beside the user's file either
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.dont_write_bytecode = writes_bytecode


def _import_problem(file: Path, error: Exception) -> Problem:
    """Names the last line of the user's file on the way to the error."""
    line = ""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        line = f"line {error.lineno}: {(error.text or '').strip()}"
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(file):
            line = f"line {frame.lineno}: {frame.line}"
    return Problem(
        f"the plugin cannot be imported: {type(error).__name__}: {error}",
        "plugins",
        line or None,
        shown(file),
        "a file that Python imports without an error",
        f"try: python {shown(file)}",
    )


def _problems(file: Path, registered: list[tuple[str, str]]) -> list[Problem]:
    if not registered:
        return [
            Problem(
                "the plugin registers nothing",
                "plugins",
                source=shown(file),
                expected="a class under @register_model, @register_data or @register_optimizer (recipes.registry)",
                remedy="@register_model('my_model', MyConfig, task='causal_lm') above a class with a static build()",
            )
        ]
    return [problem for group, name in registered for problem in _entry_problems(file, group, KINDS[group][name])]


def _entry_problems(file: Path, group: str, entry: Entry) -> list[Problem]:
    function, signature = NEEDED[group]
    base = BASES[group]
    where = f"{shown(file)}, {group} '{entry.name}'"
    problems = []
    if function not in (entry.functions or {}):
        problems.append(Problem(f"there is no {function}()", "plugins", source=where, expected=signature))
    if not (isinstance(entry.config, type) and is_dataclass(entry.config) and issubclass(entry.config, base)):
        remedy = f"@dataclass class MyConfig({base.__name__}) (from {base.__module__})"
        problems.append(
            Problem(f"its config is no dataclass under {base.__name__}", "plugins", source=where, remedy=remedy)
        )
        return problems
    for item in fields_of(entry.config):
        if nested_dataclass(item.annotation) is None and not is_readable(item.annotation):
            problems.append(
                Problem(
                    f"its config field '{item.name}' has a type that YAML cannot give",
                    "plugins",
                    str(item.annotation),
                    where,
                    remedy=READABLE,
                )
            )
    return problems
