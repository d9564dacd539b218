"""Why one ``key=value`` argument cannot be read: Hydra's grammar and the shell, told with what to type instead."""

from __future__ import annotations

import shlex

from launcher.check.near import did_you_mean, near_keys
from launcher.errors import Problem

# Characters that Hydra's grammar takes in a value without quotes, besides letters, digits and spaces.
PLAIN = set("_-/\\+.$%*@?|:,[]{}()'\"=~")


def quoted(key: str, value: str) -> str:
    """The argument with its value quoted for Hydra, and all of it for the shell."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"') if '"' in value else value
    return shlex.quote(f'{key}="{escaped}"')


def unreadable(argument: str, reason: str) -> Problem:
    """The problem of an argument that Hydra's grammar refused; ``reason`` is the grammar's own message."""
    key, has_value, value = argument.partition("=")
    what, remedy = _cause(key, has_value, value)
    return Problem(
        what or f"this is not readable: {reason}",
        key.lstrip("+~") if has_value else "",
        value or None,
        f"command line: {argument}",
        "key=value",
        remedy,
    )


def without_value(argument: str, presets: dict[str, list[str]], actions: tuple[str, ...], known: list[str]) -> Problem:
    """An argument without ``=``: perhaps a preset's name, an action, or a key whose value is missing."""
    groups = [group for group, names in presets.items() if argument in names]
    remedy = ""
    if argument in actions:
        remedy = f"action={argument}"
    elif groups:
        remedy = did_you_mean([f"{group}={argument}" for group in groups])
    elif argument in presets or argument in known:
        remedy = f"{argument}=VALUE"
    elif "/" in argument or "*" in argument or argument.endswith((".py", ".yaml", ".txt")):
        remedy = (
            "if the shell made this out of a * or a ~, quote the argument; a file of your own is named by a key, "
            "as in plugins='[./my_model.py]'"
        )
    elif matches := near_keys(argument, [*known, *presets]):
        remedy = did_you_mean([f"{match}=VALUE" for match in matches])
    return Problem(
        "an argument without =",
        source=f"command line: {argument}",
        expected="key=value",
        remedy=remedy or "fsdp-launch --help lists groups and keys",
    )


def deletion(argument: str) -> Problem:
    """``~key``: Hydra's way to remove a key, which would silently bring back the default here."""
    key = argument.lstrip("~").partition("=")[0]
    remedy = f"{key}=null where null is allowed, else leave it out"
    if key.startswith("/") or not key:
        remedy = f'if a home folder was meant: "$HOME{key}"'
    return Problem(
        "~ in front of a key removes it in Hydra's grammar; no key of this config can be removed",
        source=f"command line: {argument}",
        expected="a value, or null where the key allows it",
        remedy=remedy,
    )


def needs_multirun(argument: str, key: str, value: str) -> Problem:
    """A comma or a range outside brackets asks for several runs."""
    is_list = "," in value and "(" not in value
    as_list = shlex.quote(f"{key}=[{value}]")
    return Problem(
        "several values ask for several runs (a sweep), which needs -m",
        key,
        value,
        f"command line: {argument}",
        "one value",
        f"one list: {as_list}; one text: {quoted(key, value)}; several runs: -m"
        if is_list
        else f"one text: {quoted(key, value)}; several runs: -m",
    )


def _at_home(value: str) -> str:
    return value.replace("~/", "$HOME/")


def _is_tuple(value: str) -> bool:
    """``(0.9,0.95)``: a list as Python would write it."""
    return value.startswith("(") and value.endswith(")") and "," in value


def _is_plain(character: str) -> bool:
    if character.isalnum():
        return character.isascii()
    return character == " " or (character in PLAIN and character != "~")


def _cause(key: str, has_value: str, value: str) -> tuple[str, str]:
    """(what is wrong, what to type), both empty where nothing is recognised."""
    if not key.strip("+~ "):
        return "there is no key in front of the =", "key=value"
    if has_value and key != key.strip():
        return "no spaces around the =", shlex.quote(f"{key.strip()}={value.strip()}")
    if value.startswith("~"):
        rest = value.removeprefix("~")
        home = f'{key}="$HOME{rest}"' if rest.startswith("/") or not rest else quoted(key, value)
        return "the shell did not expand ~ here, and Hydra's grammar does not know it", home
    if value.startswith("=") and key.strip():
        return "there is one = too many", shlex.quote(f"{key}={value.lstrip('=')}")
    if "~/" in value:  # inside a list
        return "the shell does not expand ~ here, and Hydra's grammar does not know it", f'{key}="{_at_home(value)}"'
    if _is_tuple(value):
        return "a list is written in square brackets", shlex.quote(f"{key}=[{value[1:-1]}]")
    for opening, closing in (("[", "]"), ("{", "}"), ("(", ")")):
        if value.count(opening) != value.count(closing):
            where = "opened and not closed" if value.count(opening) > value.count(closing) else "closed and not opened"
            return (
                f"a bracket is {where} ({opening}{closing}); lists are quoted for the shell",
                shlex.quote(f"{key}=[a,b]") + f"; as plain text: {quoted(key, value)}",
            )
    if "=" in value:
        return "an = inside a value must be quoted for Hydra", quoted(key, value)
    for quote in "'\"":
        if value.count(quote) % 2:
            return f"a quote ({quote}) is opened and not closed", quoted(key, value)
    strange = [character for character in value if not _is_plain(character)]
    if strange:
        remedy = quoted(key, value)
        if "," in value and not any(character in value for character in "[]{}()'\""):
            each = ",".join(f'"{part}"' for part in value.split(","))
            remedy += f"; as several values (-m): {shlex.quote(f'{key}={each}')}"
        return f"the character {strange[0]!r} must be quoted for Hydra", remedy
    if any(character in value for character in "[]{}()'\""):
        return "brackets or quotes inside a value must be quoted for Hydra", quoted(key, value)
    if has_value and not all(part.isidentifier() or part.isdigit() for part in key.lstrip("+~").split(".")):
        return "this is no config key", "keys are names joined by dots, as in train.steps"
    return "", ""
