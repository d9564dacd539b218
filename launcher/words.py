"""``key=value`` arguments: parsed by Hydra's grammar, checked against the groups, made ready for composing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from launcher import explain
from launcher.check.near import did_you_mean, near
from launcher.check.reader import as_yaml
from launcher.errors import Problem

# What people of other tools type, where it is not near enough to be found by its letters.
ALIASES = {
    "rate_limiter": {"off": "unlimited", "none": "unlimited", "false": "unlimited", "on": "fixed"},
    "sharding": {
        "ddp": "replicate",
        "none": "replicate",
        "no_shard": "replicate",
        "zero2": "full_nraf",
        "zero3": "full",
        "fsdp": "full",
        "full_shard": "full",
        "shard_grad_op": "full_nraf",
        "hybrid_shard": "hybrid",
        "hsdp": "hybrid",
    },
    "precision": {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "32": "fp32", "16": "bf16"},
    "optimizer": {"adam": "adamw"},
    "logger": {"tb": "tensorboard", "wb": "wandb", "json": "jsonl"},
    "cluster": {"single": "local", "here": "local"},
    "hardware": {"a100": "a100_80gb", "h100": "h100_80gb", "v100": "v100_32gb", "none": "unknown"},
}
ALLOWED_OF_HYDRA = ("hydra.searchpath",)


@dataclass
class Words:
    """What was read.

    overrides: every argument that Hydra's grammar takes.
    problems: the others. failed: their keys (or groups), about which nothing more is to be said.
    """

    overrides: list[Override] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)

    def refuse(self, problem: Problem, key: str = "") -> None:
        self.problems.append(problem)
        if key:
            self.failed.add(key)


def read_words(arguments: Sequence[str], is_multirun: bool) -> Words:
    """Parse each argument on its own, so that all that is wrong can be told. Arguments without = stay unread."""
    parser = OverridesParser.create()
    words = Words()
    for argument in arguments:
        key = argument.partition("=")[0].strip().lstrip("+~")
        if argument.startswith("~"):
            words.refuse(explain.deletion(argument), key)
            continue
        try:
            override = parser.parse_override(_SWEEPERS.get(argument, argument) if is_multirun else argument)
        except HydraException as error:
            reason = str(error).splitlines()[0]
            words.refuse(explain.unreadable(argument, reason), key if "=" in argument else "")
            continue
        if problem := _unusable(override, is_multirun):
            words.refuse(problem, override.key_or_group)
        else:
            words.overrides.append(override)
    return words


def jobs_of(overrides: Sequence[Override], config_loader: Any) -> list[list[Override]]:
    """Every combination of the values that ``-m`` sweeps over, in Hydra's order."""
    lines = [str(override.input_line) for override in overrides]
    with_loader = OverridesParser.create(config_loader=config_loader).parse_overrides(lines)
    parser = OverridesParser.create()
    return [parser.parse_overrides(list(job)) for job in BasicSweeper.split_arguments(with_loader, None)[0]]


def check_presets(overrides: Sequence[Override], presets: Mapping[str, list[str]]) -> Words:
    """Every chosen preset exists; what does not is refused, and the group is not composed."""
    words = Words()
    for override in overrides:
        group = override.key_or_group
        if group not in presets:
            words.overrides.append(override)
            continue
        if group == "experiment" and override.value() is None:
            continue  # no experiment is what there is without a word
        problems = _preset_problems(override, presets[group])
        for problem in problems:
            words.refuse(problem, group)
        if not problems:
            words.overrides.append(override)
    return words


def for_composing(override: Override, presets: Mapping[str, list[str]], own_primary: bool) -> str:
    """The argument as it goes to Hydra.

    Keys are force-added (``++``): Hydra would stop at the first unknown one and advise to add it, while our checker
    tells all of them with near matches. ``+`` before a built-in group is dropped: the group is in the defaults already.
    """
    line = str(override.input_line)
    if override.is_hydra_override():
        return line.lstrip("+")
    if override.key_or_group in presets or "/" in override.key_or_group:
        return line if own_primary else line.lstrip("+")
    return "++" + line.lstrip("+")


def _unusable(override: Override, is_multirun: bool) -> Problem | None:
    line, key = str(override.input_line), override.key_or_group
    if "/" in key and not override.is_hydra_override():
        dotted = key.replace("/", ".")
        what = "keys are joined by dots"
        return Problem(what, key, None, f"command line: {line}", "key=value", f"{dotted}={override.get_value_string()}")
    if not key:
        return explain.unreadable(line, "no key")
    if (key == "hydra" or override.is_hydra_override()) and key not in ALLOWED_OF_HYDRA:
        return _of_hydra(line, key)
    if override.package is not None:
        what = "@ puts a group into another place, which no group of this config can take"
        return Problem(what, key, source=f"command line: {line}", remedy=f"{key}={override.get_value_string()}")
    if override.is_sweep_override() and not is_multirun:
        return explain.needs_multirun(line, key, override.get_value_string())
    if override.type is OverrideType.DEL:
        return explain.deletion(line)
    return None


def _of_hydra(line: str, key: str) -> Problem:
    remedy = {
        "hydra.run.dir": "run.dir=PATH",
        "hydra.sweep.dir": "sweep.dir=PATH",
        "hydra.job.name": "run.name=NAME",
        "hydra.verbose": "run.log_level=debug",
    }.get(key, "leave it out")
    what = "Hydra only composes the config here: this has no effect, so it is refused"
    if key == "hydra/launcher":
        what = "fsdp-launch starts the jobs of a sweep itself, each with its own ranks; Hydra's launchers know no ranks"
        remedy = _INSTEAD_OF_LAUNCHERS.get(line.partition("=")[2], "leave it out")
    elif key == "hydra/sweeper":
        what = "there is no such sweeper here"
        remedy = "leave it out for every combination, or -m hydra/sweeper=optuna for a search"
    elif key.startswith("hydra.sweeper."):
        what = "options of a search are keys of sweep"
        remedy = _INSTEAD_OF_SWEEPERS.get(key.removeprefix("hydra.sweeper."), "fsdp-launch --help sweep")
    return Problem(what, key, source=f"command line: {line}", remedy=remedy)


_INSTEAD_OF_LAUNCHERS = {
    "joblib": "sweep.max_parallel=4",
    "ray": "sweep.max_parallel=4",
    "submitit_slurm": "cluster=slurm",
}
_INSTEAD_OF_SWEEPERS = {
    "n_trials": "sweep.trials=20",
    "n_jobs": "sweep.max_parallel=4",
    "direction": "sweep.direction=maximize",
    "sampler": "sweep.sampler=random",
    "sampler.seed": "sweep.sampler_seed=1",
}
_SWEEPERS = {"hydra/sweeper=optuna": "sweep.sweeper=optuna", "hydra/sweeper=basic": "sweep.sweeper=grid"}


def _preset_problems(override: Override, names: list[str]) -> list[Problem]:
    group, value, line = override.key_or_group, override.value(), str(override.input_line)
    if isinstance(value, dict):
        what = "this is a group: choose a preset, or set its keys one by one"
        remedy = " ".join(f"{group}.{key}=VALUE" for key in list(value)[:3]) or f"{group}={names[0]}"
        return [Problem(what, group, str(value), f"command line: {line}", f"one of {', '.join(names)}", remedy)]
    if value is None:
        what, remedy = "a group needs a preset, not null", f"one of {', '.join(names)}"
        return [Problem(what, group, "null", f"command line: {line}", remedy)]
    chosen = value if isinstance(value, list) else [value]
    problems = []
    for name in chosen:
        if str(name).removesuffix(".yaml") in names or "/" in str(name):  # a folder of the user's: Hydra finds it
            continue
        text = name if isinstance(name, str) else as_yaml(name)
        problems.append(_no_preset(group, text, names, f"command line: {line}"))
    return problems


def _no_preset(group: str, name: str, names: list[str], source: str) -> Problem:
    alias = ALIASES.get(group, {}).get(name.lower())
    matches = [alias] if alias in names else near(name, names)
    if name == "":
        what, remedy = "there is nothing after the =", f"{group}=NAME without spaces around the ="
    else:
        what = f"there is no preset '{name}' in this group"
        remedy = did_you_mean([f"{group}={match}" for match in matches])
    if not remedy and name.isdecimal():
        remedy = f"a single key of the group is set as {group}.KEY={name}"
    return Problem(what, group, name or None, source, f"one of {', '.join(names)}", remedy)
