"""``fsdp-launch``: arguments in, exit code out. Composes, checks everything, and only then starts anything."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher.actions import IN_THIS_PROCESS
from launcher.actions.adopt import adopt
from launcher.announce import let_the_first_rank_speak
from launcher.checked import check, checked
from launcher.command_line import CommandLine, parse
from launcher.compose import Composed, Composer, named_plugins
from launcher.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, ConfigErrors, Problem
from launcher.help import UnknownTopic, help_text, version_text
from launcher.launch import launch
from launcher.multirun import run_sweep
from launcher.plugins import load_plugins
from launcher.request import LaunchRequest
from launcher.resolved import to_yaml
from launcher.schema import Config
from launcher.slurm import one_run
from launcher.slurm.start import printed_script, submit_run
from launcher.streams import lead_nowhere, make_streams_safe
from launcher.sweep.commands import run_command
from launcher.words import read_words

ONE_OF = ("run", "multirun", "cfg", "info", "shell_completion")
REFUSED = {
    "config_path": Problem(
        "--config-path would replace the built-in presets",
        source="--config-path",
        remedy="--config-dir FOLDER adds presets of yours; --config-name NAME chooses a primary config among them",
    ),
    "experimental_rerun": Problem(
        "--experimental-rerun reads a Hydra job, and Hydra runs no job here",
        source="--experimental-rerun",
        remedy="the run folder's command.txt holds the command",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The program. ``argv``: arguments without the program's name; None: those of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    make_streams_safe()
    try:
        return _run(arguments)
    except ConfigErrors as errors:
        _tell(errors)
        return EXIT_USAGE
    except KeyboardInterrupt:  # while composing; a run that has started answers for itself
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever reads `fsdp-launch --help | head` has seen enough
        lead_nowhere(sys.stdout)
        return EXIT_OK
    except OSError as error:  # a full disk under standard output, no more processes, a folder that is gone
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        what = f"the system refuses: {error.strerror or error}"
        _tell(ConfigErrors([Problem(what, got=None if error.filename is None else str(error.filename))]))
        lead_nowhere(sys.stdout)
        return EXIT_USAGE


def _run(arguments: list[str]) -> int:
    line = parse(arguments)
    if "help" in line.flags:
        print(_help(line))
        return EXIT_OK
    if "version" in line.flags:
        print(version_text())
        return EXIT_OK
    _refuse_flags(line)
    composer = Composer(line)
    if _answered_by_hydra(line, composer):
        return EXIT_OK
    if "multirun" in line.flags:
        return run_sweep(composer, arguments)
    composed = adopt(composer.compose(composer.words.overrides))
    if "cfg" in line.flags:
        return _show_config(line, composed)
    config = checked(composed)
    if config.action == "sweep":
        run_dir = one_run.submitted(config.sweep.dir)
        if run_dir is not None:
            return one_run.run_command(run_dir, config.sweep.do)
        return run_command(config, composed.overrides, composed.sources)
    _refuse_sweep_keys(composed)
    request = _request(arguments, composed, config)
    if config.action in IN_THIS_PROCESS:
        return IN_THIS_PROCESS[config.action](config, request)
    if config.action == "print_script":
        print(printed_script(config, request), end="")
        return EXIT_OK
    if config.cluster.kind == "slurm":
        return submit_run(config, request)
    return launch(config, request)


def _refuse_sweep_keys(composed: Composed) -> None:
    """Options of a sweep have no effect on one run, but for waiting for its job."""
    keys = [word.partition("=")[0].lstrip("+") for word in composed.overrides]
    wrong = [key for key in keys if key.startswith("sweep.") and key != "sweep.wait"]
    if wrong:
        what = "one run is no sweep: this would have no effect"
        raise ConfigErrors([Problem(what, key, source=composed.sources.of(key), remedy="-m ...") for key in wrong])


def _help(line: CommandLine) -> str:
    """Kinds of a plugin have help, too: ``fsdp-launch plugins='[./my_model.py]' --help my_model``."""
    config_dir = Path(line.flags.get("config_dir", ""))
    topics = [word for word in line.words if not word.startswith("plugins=")]
    if topics != line.words:
        load_plugins(named_plugins(read_words(line.words, is_multirun=False).overrides))
    try:
        return help_text(topics, config_dir if "config_dir" in line.flags and config_dir.is_dir() else None)
    except UnknownTopic as unknown:
        raise ConfigErrors([Problem(str(unknown), source="--help", remedy="fsdp-launch --help")]) from None


def _refuse_flags(line: CommandLine) -> None:
    problems = [REFUSED[flag] for flag in line.flags if flag in REFUSED]
    commands = [flag for flag in line.flags if flag in ONE_OF]
    if len(commands) > 1:
        named = " and ".join("--" + flag.replace("_", "-") for flag in commands)
        problems.append(Problem(f"{named} do not go together", expected="one of them"))
    for flag in ("resolve", "package"):
        if flag in line.flags and "cfg" not in line.flags:
            problems.append(Problem(f"--{flag} says how --cfg prints", remedy=f"--cfg job --{flag}"))
    if problems:
        raise ConfigErrors([*line.problems, *problems])


def _answered_by_hydra(line: CommandLine, composer: Composer) -> bool:
    """Questions about Hydra itself go to Hydra, once everything typed is readable."""
    if not {"hydra_help", "info", "shell_completion"} & line.flags.keys():
        return False
    if "shell_completion" in line.flags:
        try:
            composer.loader.complete_shell(line.words)
        except ValueError as error:
            remedy = 'eval "$(fsdp-launch --shell-completion install=bash)"'
            raise ConfigErrors([Problem(str(error), source="--shell-completion", remedy=remedy)]) from None
        return True
    composed = composer.compose(composer.words.overrides)
    if composed.problems:
        raise ConfigErrors(list(composed.problems))
    if "info" in line.flags:
        composer.loader.show_info(line.flags["info"], composed.lines)
    else:
        composer.loader.show_hydra_help(composed.lines)
    return True


def _show_config(line: CommandLine, composed: Composed) -> int:
    """``--cfg``: the config as YAML on standard output; what is wrong with it on standard error."""
    config, problems = check(composed)
    tree: Any = composed.as_composed
    if "resolve" in line.flags:
        tree = composed.tree if problems else dataclasses.asdict(config)
    if line.flags["cfg"] == "hydra":
        tree = {"hydra": composed.hydra}
    elif line.flags["cfg"] == "all":
        tree = {"hydra": composed.hydra, **tree}
    part = line.flags.get("package", "_global_")
    if part != "_global_":
        tree = _part(tree, part)
    text = tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    print((f"# @package {part}\n" if part != "_global_" else "") + text.removesuffix("...\n"), end="")
    if problems:
        raise ConfigErrors(problems)
    return EXIT_OK


def _part(tree: Any, part: str) -> Any:
    for name in part.split("."):
        if not isinstance(tree, dict) or name not in tree:
            raise ConfigErrors([Problem(f"there is no part '{part}' in the config", source="--package")])
        tree = tree[name]
    return tree


def _request(arguments: list[str], composed: Composed, config: Config) -> LaunchRequest:
    return LaunchRequest(
        config_yaml=to_yaml(config),
        overrides=composed.overrides,
        command=("fsdp-launch", *arguments),
        choices=composed.choices,
    )


def _tell(errors: ConfigErrors) -> None:
    """Once per host: of ranks that torchrun started, the first of each host speaks.

    The others wait for it: torchrun ends all ranks as soon as one has failed.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        text = f"{errors}\n\n{errors.closing}"
        print(text, file=sys.stderr, flush=True)
    else:
        let_the_first_rank_speak()
