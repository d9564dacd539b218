"""The arguments, sorted into flags and overrides; what the shell did to them is told in the user's terms."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.check.near import did_you_mean, near
from launcher.errors import Problem

VALUES_OF_CFG = ("job", "hydra", "all")
VALUES_OF_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


@dataclass(frozen=True)
class Flag:
    """names: spellings. value: none, one or optional. choices: allowed values, if few. help: one line."""

    names: tuple[str, ...]
    value: str
    help: str
    choices: tuple[str, ...] = ()


FLAGS = {
    "help": Flag(("--help", "-h"), "none", "this help; with a group's name (--help train): its keys"),
    "hydra_help": Flag(("--hydra-help",), "none", "Hydra's own help"),
    "version": Flag(("--version",), "none", "versions"),
    "cfg": Flag(("--cfg", "-c"), "one", "print the composed config (job) and do nothing else", VALUES_OF_CFG),
    "resolve": Flag(("--resolve",), "none", "with --cfg: interpolations replaced by their values"),
    "package": Flag(("--package", "-p"), "one", "with --cfg: only this part, as in --package train"),
    "run": Flag(("--run", "-r"), "none", "one run (the default)"),
    "multirun": Flag(("--multirun", "-m"), "none", "several runs: key=a,b and ranges are combined"),
    "shell_completion": Flag(("--shell-completion", "-sc"), "none", "install, uninstall or query completion"),
    "config_path": Flag(("--config-path", "-cp"), "one", "not supported: use --config-dir"),
    "config_name": Flag(("--config-name", "-cn"), "one", "another primary config than the built-in one"),
    "config_dir": Flag(("--config-dir", "-cd"), "one", "a folder with presets of your own, laid out as ours"),
    "experimental_rerun": Flag(("--experimental-rerun",), "one", "not supported"),
    "info": Flag(("--info", "-i"), "optional", "what Hydra composed from what", VALUES_OF_INFO),
}
_BY_NAME = {name: key for key, flag in FLAGS.items() for name in flag.names}
CLOSING = {"[": "]", "{": "}", "(": ")"}


@dataclass
class CommandLine:
    """Arguments by kind.

    flags: the flags given, by their key in ``FLAGS``; the value of a flag without one is "".
    words: ``key=value`` arguments (and those meant so), in order, as typed.
    problems: what cannot be understood; the arguments concerned are in neither of the others.
    failed: config keys that such arguments meant to set.
    """

    flags: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


def parse(arguments: Sequence[str]) -> CommandLine:
    """Never raises: everything that is wrong is in ``problems``."""
    line = CommandLine()
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            line.words.extend(rest)
            break
        if argument.startswith("-") and not argument.startswith("-="):
            _take_flag(argument, rest, line)
        else:
            _take_word(argument, rest, line)
    return line


def _take_flag(argument: str, rest: list[str], line: CommandLine) -> None:
    name, has_value, value = argument.partition("=")
    key = _BY_NAME.get(name)
    if key is None:
        _unknown_flag(argument, rest, line)
        return
    flag = FLAGS[key]
    if flag.value == "none":
        if has_value:
            line.problems.append(Problem(f"{name} takes no value", got=argument, remedy=name))
        line.flags[key] = ""
        return
    if not has_value and rest and _could_be_value(rest[0], flag):
        value = rest.pop(0)
    elif not has_value and flag.value == "optional":
        value = "all"
    if not value:
        line.problems.append(
            Problem(f"{name} needs a value", expected=" or ".join(flag.choices), remedy=f"{name} VALUE")
        )
    elif flag.choices and value not in flag.choices:
        matches = did_you_mean(near(value, flag.choices))
        line.problems.append(Problem(f"{name} does not know this", got=value, expected=_one_of(flag), remedy=matches))
    else:
        line.flags[key] = value


def _could_be_value(argument: str, flag: Flag) -> bool:
    if flag.value == "optional":
        return argument in flag.choices
    return not argument.startswith("-") and not (flag.choices and "=" in argument)


def _one_of(flag: Flag) -> str:
    return f"one of {', '.join(flag.choices)}"


def _unknown_flag(argument: str, rest: list[str], line: CommandLine) -> None:
    """``--train.steps=5``, ``--train.steps 5`` or a misspelt flag."""
    key, has_value, value = argument.lstrip("-").partition("=")
    shown = argument
    flags = [] if "." in key or has_value else near(argument, _BY_NAME)
    if not flags and not has_value and rest and "=" not in rest[0] and not rest[0].startswith("-"):
        value = rest.pop(0)
        shown = f"{argument} {value}"
    if flags:
        line.problems.append(Problem(f"there is no flag {argument}", source=shown, remedy=did_you_mean(flags)))
        return
    line.failed.add(key)
    line.problems.append(
        Problem(
            "config keys are written without dashes",
            source=f"command line: {shown}",
            expected="key=value",
            remedy=shlex.quote(f"{key}={value or 'VALUE'}") if key else "see fsdp-launch --help",
        )
    )


def _take_word(argument: str, rest: list[str], line: CommandLine) -> None:
    """Put together what the shell took apart; a word that is whole goes to ``words``."""
    pieces = _pieces_of_assignment(argument, rest) or _pieces_of_brackets(argument, rest)
    if pieces is None:
        line.words.append(argument)
        return
    del rest[: len(pieces) - 1]
    typed = " ".join(pieces)
    line.failed.add(typed.partition("=")[0].strip().lstrip("+~"))
    if len(pieces) > 1 and any(_opens(piece) for piece in pieces):
        line.problems.append(
            Problem(
                "the shell took this apart at its spaces",
                source=f"command line: {typed}",
                expected="one argument, quoted",
                remedy=shlex.quote(typed),
            )
        )
        return
    key, _, value = typed.partition("=")
    line.problems.append(
        Problem(
            "no spaces around the =",
            source=f"command line: {typed}",
            expected="key=value",
            remedy=shlex.quote(f"{key.strip()}={value.strip() or 'VALUE'}"),
        )
    )


def _pieces_of_assignment(argument: str, rest: list[str]) -> list[str] | None:
    """``key = value``, ``key= value`` or ``key =value``, which the shell hands over as several arguments."""
    following = rest[:2]
    if argument == "=":
        return [argument, *following[:1]]
    if "=" not in argument and following and following[0].startswith("="):
        return [argument, *following[: 2 if following[0] == "=" and len(following) > 1 else 1]]
    if argument.endswith("=") and following and "=" not in following[0] and not following[0].startswith(("-", "~")):
        return [argument, following[0]]
    return None


def _pieces_of_brackets(argument: str, rest: list[str]) -> list[str] | None:
    """``logger=[jsonl,`` and ``wandb]``: as many arguments as it takes to close what was opened."""
    if not _opens(argument):
        return None
    pieces = [argument]
    for following in rest:
        pieces.append(following)
        if not _opens(" ".join(pieces)):
            return pieces
    return None


def _opens(text: str) -> bool:
    """Whether a bracket is opened and not closed."""
    return any(text.count(opening) > text.count(closing) for opening, closing in CLOSING.items())
