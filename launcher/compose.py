"""From arguments to a composed tree of plain values. Hydra composes it untyped; the checker reads it afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher import explain
from launcher.check.near import did_you_mean, near
from launcher.check.reader import as_yaml, default_tree, known_keys, schema_of
from launcher.command_line import CommandLine, parse
from launcher.environment import JoinedRanks, joined_ranks
from launcher.errors import ConfigErrors, Problem
from launcher.hydra_loader import PRIMARY, HydraLoader, resolve_hydra_of, store_presets
from launcher.plugins import load_plugins, plugin_presets
from launcher.schema import ACTIONS, Config
from launcher.sources import Layer, Sources, Typed, shown
from launcher.words import Words, check_presets, for_composing, read_words
from recipes.data.files import expanded


@dataclass(frozen=True)
class Composed:
    """One composed config, not yet checked.

    tree: plain values, interpolations resolved, every key of the schema present; Hydra's own node is gone.
    as_composed: the same with interpolations unresolved, for people. hydra: Hydra's own node.
    sources: where values came from.
    problems: what composing could not make sense of; failed: the keys concerned.
    choices: the preset chosen in each group; a list group joins its names with ",".
    plugins: the user's Python files, imported.
    overrides: the ``key=value`` arguments, as typed. lines: the same as they went to Hydra.
    joined: ranks that somebody else started, if any; the tree's W is theirs then.
    """

    tree: dict[str, Any]
    as_composed: dict[str, Any]
    hydra: dict[str, Any]
    sources: Sources
    problems: tuple[Problem, ...]
    failed: frozenset[str]
    choices: dict[str, str]
    plugins: tuple[Path, ...]
    overrides: tuple[str, ...]
    lines: tuple[str, ...]
    joined: JoinedRanks | None


def compose(argv: Sequence[str]) -> Composed:
    """Compose one run from its arguments.

    Raises:
        ConfigErrors: nothing could be composed at all. Everything else that is wrong is in the result's ``problems``.
    """
    composer = Composer(parse(argv))
    return composer.compose(composer.words.overrides)


class Composer:
    """Composes one or many configs from the same command line, reading each file once."""

    def __init__(self, line: CommandLine, environ: Mapping[str, str] = os.environ) -> None:
        """Imports plugins, finds the presets. Raises ConfigErrors where going on would only mislead."""
        self.line = line
        self.joined = joined_ranks(environ)
        config_dir = _config_dir(line.flags.get("config_dir"))
        self.words = read_words(
            [word for word in line.words if "=" in word or word.startswith("~")], "multirun" in line.flags
        )
        self.plugins = self._load_plugins()
        self.config_name = line.flags.get("config_name", PRIMARY).removesuffix(".yaml")
        self.loader = HydraLoader(config_dir, self.config_name)
        searchpath = [str(word.input_line) for word in self.words.overrides if word.is_hydra_override()]
        try:
            self.presets = self.loader.groups(searchpath)
        except COMPOSING_ERRORS as error:
            raise _told(error, self.config_name, [*line.problems, *self.words.problems]) from None
        self._problems = [*line.problems, *self._words_without_value(), *self.words.problems]
        self._refuse_shadowed(config_dir)

    def compose(self, overrides: Sequence[Override]) -> Composed:
        """Compose one job. Raises ConfigErrors if Hydra cannot."""
        chosen = check_presets(overrides, self.presets)
        problems = [*self._problems, *chosen.problems]
        config, files, lines = self._compose_what_fits(chosen, problems)
        failed = self.line.failed | self.words.failed | chosen.failed
        sources = self._sources(chosen, files)
        problems.extend(self._unselected_loggers(chosen, sources))
        choices = _choices(config)
        raw = _plain(config)
        problems.extend(self._join(raw))
        tree, unresolved = _resolved(raw, config, sources)
        return Composed(
            tree=tree,
            as_composed={key: value for key, value in raw.items() if key != "hydra"},
            hydra=raw.get("hydra", {}),
            sources=sources,
            problems=(*problems, *unresolved),
            failed=frozenset(failed | {problem.key for problem in unresolved}),
            choices=choices,
            plugins=self.plugins,
            overrides=tuple(self.line.words),
            lines=tuple(lines),
            joined=self.joined,
        )

    def _compose_what_fits(
        self, chosen: Words, problems: list[Problem]
    ) -> tuple[DictConfig, Callable[[], Sequence[Layer]], list[str]]:
        """Compose; an override that cannot be merged (keys below a plain value) is refused and left out.

        Moves what is refused from ``chosen.overrides`` to ``chosen.failed`` and ``problems``.
        """
        own_primary = self.config_name != PRIMARY
        while True:
            lines = [for_composing(override, self.presets, own_primary) for override in chosen.overrides]
            try:
                return *self.loader.compose(lines), lines
            except COMPOSING_ERRORS as error:
                unmergeable = [line for line in lines if str(error).strip() == f"Error merging override {line}"]
                if not unmergeable:
                    raise _told(error, self.config_name, problems) from None
                override = chosen.overrides.pop(lines.index(unmergeable[0]))
                chosen.failed.add(override.key_or_group)
                problems.append(_unmergeable(override, error))

    def _load_plugins(self) -> tuple[Path, ...]:
        try:
            files = tuple(load_plugins(named_plugins(self.words.overrides)))
        except ConfigErrors as errors:
            raise ConfigErrors([*self.line.problems, *self.words.problems, *errors.problems]) from None
        store_presets(plugin_presets())
        return files

    def _words_without_value(self) -> list[Problem]:
        bare = [word for word in self.line.words if "=" not in word and not word.startswith("~")]
        if not bare:
            return []
        known = known_keys(Config, {})
        return [explain.without_value(word, self.presets, ACTIONS, known) for word in bare]

    def _refuse_shadowed(self, config_dir: Path | None) -> None:
        """A user's preset with a built-in's name would never be read: Hydra searches the built-in ones first."""
        if config_dir is None:
            return
        for file in sorted(config_dir.glob("*.yaml")) + sorted(config_dir.glob("*/*.yaml")):
            name = file.relative_to(config_dir).with_suffix("").as_posix()
            if self.loader.is_built_in(name):
                what = f"'{name}' is the name of a built-in preset, which would be used instead of this file"
                remedy = "give the file another name"
                if name == PRIMARY:
                    remedy += "; a primary config of your own is chosen with --config-name NAME"
                self._problems.append(Problem(what, source=shown(file), remedy=remedy))

    def _sources(self, chosen: Words, files: Callable[[], Sequence[Layer]]) -> Sources:
        typed = [
            Typed(override.key_or_group, str(override.input_line))
            for override in chosen.overrides
            if override.key_or_group not in self.presets
        ]
        environment = {}
        if self.joined is not None:
            text = f"environment: WORLD_SIZE={self.joined.world_size} LOCAL_WORLD_SIZE={self.joined.local_world_size}"
            environment = dict.fromkeys(("cluster.kind", "cluster.num_nodes", "cluster.nproc_per_node"), text)
        return Sources(typed, files, environment)

    def _unselected_loggers(self, chosen: Words, sources: Sources) -> list[Problem]:
        """``logger.wandb.project=x`` without wandb selected: setting a key must not switch a logger on."""
        problems = []
        for override in chosen.overrides:
            parts = override.key_or_group.split(".")
            if parts[0] != "logger" or len(parts) < 3 or parts[1] not in self.presets.get("logger", []):
                continue
            if "logger" not in self.line.failed and not sources.is_in_file(f"logger.{parts[1]}"):
                line = str(override.input_line)
                remedy = f"'logger=[jsonl,{parts[1]}]' {line}"
                what = f"the logger {parts[1]} is not selected"
                problems.append(Problem(what, override.key_or_group, None, f"command line: {line}", "", remedy))
        return problems

    def _join(self, raw: dict[str, Any]) -> list[Problem]:
        """Ranks that exist already decide W, whatever the presets say; from a job step no further job is submitted."""
        if self.joined is None or not isinstance(raw.get("cluster"), dict):
            return []
        wanted = raw["cluster"].get("kind")
        raw["cluster"].update(
            kind="torchrun", num_nodes=self.joined.num_nodes, nproc_per_node=self.joined.local_world_size
        )
        if wanted != "slurm" or self.joined.step is None:
            return []
        what = f"these are {self.joined.world_size} ranks of a job step already, and each would submit a job"
        remedy = "leave cluster=slurm out to train on these ranks, or submit from outside of srun"
        return [Problem(what, "cluster", "slurm", "environment: SLURM_STEP_ID", remedy=remedy)]


def named_plugins(overrides: Sequence[Override]) -> list[str]:
    """The files of ``plugins=[...]``. Raises ConfigErrors if it is no list of files."""
    named: Any = []
    for override in overrides:
        if override.key_or_group == "plugins":
            named = override.value()
        elif override.key_or_group.startswith("plugins."):
            what = "plugins is one list of files, named as a whole"
            remedy = f"plugins='[{override.get_value_string()}]'"
            source = f"command line: {override.input_line}"
            raise ConfigErrors([Problem(what, override.key_or_group, source=source, remedy=remedy)])
    if not isinstance(named, list) or not all(isinstance(path, str) for path in named):
        remedy = f"plugins='[{named}]'" if isinstance(named, str) else "plugins='[./my_model.py]'"
        raise ConfigErrors(
            [Problem("this is no list of files", "plugins", as_yaml(named), "command line", "a list", remedy)]
        )
    return named


def _told(error: Exception, config_name: str, problems: list[Problem]) -> Exception:
    """Hydra's error as ConfigErrors, after the ``problems`` found so far; as it is, if its traceback is asked for."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        return error
    return ConfigErrors([*problems, _composing_problem(error, config_name)])


def _unmergeable(override: Override, error: Exception) -> Problem:
    value = override.get_value_string()
    source = f"command line: {override.input_line}"
    return Problem(
        f"this does not fit what is there: {_first_line(error.__cause__)}", override.key_or_group, value, source
    )


COMPOSING_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    OSError,
    ValueError,
    TypeError,
    KeyError,
    RecursionError,
)


def _composing_problem(error: Exception, config_name: str) -> Problem:
    """Hydra's own errors, without its advice to append keys (ours are checked) and without its search path."""
    missing = getattr(error, "missing_cfg_file", None)
    options = getattr(error, "options", None) or []
    if missing:
        remedy = did_you_mean(near(str(missing).rpartition("/")[2], options))
        if missing == config_name and not options:
            remedy = "--config-name NAME with --config-dir FOLDER, where FOLDER holds NAME.yaml"
        expected = f"one of {', '.join(options)}" if options else ""
        return Problem(f"there is no config '{missing}'", source=_first_line(error), expected=expected, remedy=remedy)
    if isinstance(error, yaml.YAMLError):
        return Problem(f"a YAML file cannot be read: {error}", remedy="correct the file")
    if isinstance(error, RecursionError):
        return Problem(
            "presets include each other in a circle", remedy="correct the defaults lists of your own presets"
        )
    cause = f"\n{error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    text = "\n".join(line for line in f"{error}{cause}".splitlines() if line.strip() and "To append to" not in line)
    return Problem(f"the config cannot be composed: {text or type(error).__name__}")


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else ""


def _config_dir(text: str | None) -> Path | None:
    if text is None:
        return None
    path = expanded(text).absolute()
    if not path.is_dir():
        problem = Problem(
            "there is no such folder", "", text, "--config-dir", "a folder with presets", "--config-dir PATH"
        )
        raise ConfigErrors([problem])
    return path


def _choices(config: DictConfig) -> dict[str, str]:
    raw = OmegaConf.to_container(config.hydra.runtime.choices, resolve=False)
    assert isinstance(raw, dict)
    choices = {str(group): str(name) for group, name in raw.items() if name and not str(group).startswith("hydra/")}
    loggers = OmegaConf.select(config, "logger")
    if isinstance(loggers, DictConfig):  # chosen as a list, which Hydra does not count among its choices
        choices["logger"] = ",".join(str(name) for name in loggers)
    return dict(sorted(choices.items()))


def _plain(config: DictConfig) -> dict[str, Any]:
    """The composed tree as plain values, interpolations still as text, with every key of the schema filled in."""
    tree = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    assert isinstance(tree, dict)
    raw = {str(key): value for key, value in tree.items()}
    _complete(raw, default_tree(Config, schema_of(raw)))
    return raw


def _complete(tree: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Keys that no file and no argument gave get their default, so that interpolations can refer to them."""
    for key, value in defaults.items():
        if key not in tree:
            tree[key] = value
        elif isinstance(tree[key], dict) and isinstance(value, dict):
            _complete(tree[key], value)


def _resolved(raw: dict[str, Any], config: DictConfig, sources: Sources) -> tuple[dict[str, Any], list[Problem]]:
    """Interpolations replaced by values; one that cannot be resolved is a problem and keeps its text."""
    ours = {key: value for key, value in raw.items() if key != "hydra"}
    if not _has_interpolation(ours):
        return ours, []
    resolve_hydra_of(config)
    whole = OmegaConf.create(raw)
    problems: list[Problem] = []

    def resolve(node: Any, path: str) -> Any:
        if isinstance(node, dict):
            return {name: resolve(value, f"{path}.{name}" if path else str(name)) for name, value in node.items()}
        if isinstance(node, list):
            return [resolve(value, f"{path}[{index}]") for index, value in enumerate(node)]
        if not _has_interpolation(node):
            return node
        try:
            value = OmegaConf.select(whole, path, throw_on_missing=True)
            return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            key = path.partition("[")[0]
            expected = "${KEY} of this config, or ${oc.env:NAME} for an environment variable"
            what = f"the interpolation cannot be resolved: {_first_line(error)}"
            problems.append(Problem(what, key, str(node), sources.of(key), expected))
            return node

    return resolve(ours, ""), problems


def _has_interpolation(node: Any) -> bool:
    if isinstance(node, dict):
        return any(_has_interpolation(value) for value in node.values())
    if isinstance(node, list):
        return any(_has_interpolation(value) for value in node)
    return isinstance(node, str) and "${" in node
