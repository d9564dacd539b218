"""``--help``: what can be typed, read from the presets and the schema. Needs neither Hydra nor torch."""

from __future__ import annotations

import importlib.resources
import re
import textwrap
from importlib import metadata
from pathlib import Path

from launcher.check.reader import KINDS, Item, as_yaml, fields_of, nested_dataclass
from launcher.check.values import expected, is_readable
from launcher.command_line import FLAGS
from launcher.schema import Config

WIDTH = 110
_ENTRY = re.compile(r"^  \S.*(?:\n {3,}.*)*", re.MULTILINE)  # a key's first line and those that continue it
SHAPE = "fsdp-launch [FLAGS] [GROUP=PRESET ...] [KEY=VALUE ...]"
INTRO = """\
Trains a model with fully sharded data parallelism: YAML presets and your overrides are composed, checked as a whole,
and run on the ranks of this machine, or on ranks that torchrun started."""
COMMANDS = (
    ("fsdp-launch", "the default run: a small GPT, two ranks, three minutes"),
    ("fsdp-launch model=t5_tiny sharding=hybrid sharding.factor=2 cluster.nproc_per_node=4", ""),
    ("fsdp-launch model=dhen_tiny data=synthetic_clicks sharding.reshard_after_forward=false", ""),
    ("fsdp-launch model=gpt_tiny precision=bf16 rate_limiter.max_inflight=3 train.steps=1e3", ""),
    ('fsdp-launch data=text_files data.path="$HOME/corpus"', "your own text"),
    ("fsdp-launch plugins='[./my_model.py]' model=my_model", "your own model"),
    ("fsdp-launch experiment=hybrid_two_hosts", "a preset that says only what differs"),
    ("fsdp-launch action=check model=gpt_1b cluster.nproc_per_node=8", "compose and check, start nothing"),
    ("fsdp-launch --cfg job --resolve", "the composed config"),
    ("torchrun --nproc-per-node 2 -m launcher model=gpt_tiny", "the same run on torchrun's ranks"),
)
CODES = (
    "0 done; 1 a rank failed; 2 bad config or usage; 3 does not fit, by its plan; 4 a sweep ended with failed jobs; "
    "5 hang; 6 out of memory; 75 saved on a signal, start again; 130 interrupted"
)


def version_text() -> str:
    """Versions of the launcher and of what it composes and trains with; asked of the installed packages."""
    return "\n".join(f"{name} {_version(name)}" for name in ("fsdp-launcher", "hydra-core", "omegaconf", "torch"))


class UnknownTopic(ValueError):
    """Nothing is called like this; the message says what there is."""


def help_text(words: list[str], config_dir: Path | None = None) -> str:
    """The whole help, or that of the groups, kinds or keys named in ``words``. Raises UnknownTopic."""
    if words:
        return "\n\n".join(_topic(word.partition("=")[0], config_dir) for word in words)
    parts = [
        INTRO,
        f"usage: {SHAPE}",
        "Common commands\n" + _commands(),
        "Groups (GROUP=PRESET; --help GROUP lists its keys)\n" + _groups(config_dir),
        "Keys of the top level\n" + _keys(Config, "", leaves_only=True),
        "Flags\n" + _flags(),
        "Lists are quoted for the shell: 'logger=[jsonl,wandb]'. A value with special characters is quoted twice:\n"
        "  'run.name=\"a=b\"'. null means none. --config-dir adds a folder of presets laid out like the built-in ones.",
        _hanging("Exit codes: ", CODES),
    ]
    return "\n\n".join(parts)


def group_names(config_dir: Path | None) -> list[str]:
    return sorted({*_folders(_built_in()), *(_folders(config_dir) if config_dir else ())})


def presets_of(group: str, config_dir: Path | None) -> dict[str, str]:
    """Name and one-line description (the file's first comment) of each preset."""
    found: dict[str, str] = {}
    for root in (_built_in(), config_dir):
        if root is not None:
            for file in sorted((root / group).rglob("*.yaml")):
                name = file.relative_to(root / group).with_suffix("").as_posix()
                found.setdefault(name, _first_comment(file))
    return found


def _topic(topic: str, config_dir: Path | None) -> str:
    """One group: its presets, then its keys; a kind of model, data or optimizer: its keys."""
    if topic in _kinds():
        group = _kinds()[topic]
        return f"{group} kind {topic}: keys\n" + _keys(KINDS[group][topic].config, group)
    if topic not in group_names(config_dir):
        return _lines_about(topic)
    presets = presets_of(topic, config_dir)
    width = max((len(name) for name in presets), default=0) + 2
    lines = [f"{topic}: presets", *(_hanging(f"  {name:<{width}}", text) for name, text in presets.items())]
    if topic in KINDS:
        kinds = ", ".join(KINDS[topic].names())
        lines += ["", f"{topic}: keys depend on the kind; --help KIND lists them: {kinds}"]
    else:
        item = next((item for item in fields_of(Config) if item.name == topic), None)
        nested = nested_dataclass(item.annotation) if item else None
        if nested is not None:
            lines += ["", f"{topic}: keys", _keys(nested, topic)]
    return "\n".join(lines)


def _lines_about(word: str) -> str:
    """A key: its line. Any other word: every line of keys that mentions it."""
    everything = [_keys(Config, ""), *(_keys(KINDS[group][kind].config, group) for kind, group in _kinds().items())]
    keys = list(dict.fromkeys(_ENTRY.findall("\n".join(everything))))
    found = [line for line in keys if line.startswith(f"  {word}=")] or [line for line in keys if word in line]
    if not found:
        groups = ", ".join(group_names(None))
        raise UnknownTopic(f"nothing is called '{word}'; groups are {groups}; kinds are {', '.join(_kinds())}")
    return f"keys with '{word}'\n" + "\n".join(found)


def _kinds() -> dict[str, str]:
    """Kind -> group, where no group has the same name."""
    return {name: group for group, registry in KINDS.items() for name in registry.names()}


def _keys(cls: type, path: str, leaves_only: bool = False) -> str:
    lines = []
    for item in fields_of(cls):
        key = f"{path}.{item.name}" if path else item.name
        nested = nested_dataclass(item.annotation)
        if nested is not None:
            if not leaves_only:
                lines.append(_keys(nested, key))
        elif item.name != "kind":
            lines.append(_hanging(f"  {_with_default(key, item)}  ", _explained(item)))
    return "\n".join(line for line in lines if line)


def _with_default(key: str, item: Item) -> str:
    return f"{key}={as_yaml(item.default()).strip(chr(39)) or chr(39) * 2}"


def _explained(item: Item) -> str:
    words = expected(item.annotation, item.limits) if is_readable(item.annotation) else ""
    return f"{item.help} [{words}]" if item.help else f"[{words}]"


def _commands() -> str:
    lines = []
    for command, about in COMMANDS:
        lines.append(f"  {command}" + (f"   # {about}" if about else ""))
    return "\n".join(lines)


def _groups(config_dir: Path | None) -> str:
    groups = group_names(config_dir)
    width = max(map(len, groups)) + 2
    return "\n".join(_hanging(f"  {group:<{width}}", ", ".join(presets_of(group, config_dir))) for group in groups)


def _flags() -> str:
    shown = []
    for flag in FLAGS.values():
        if flag.help.startswith("not supported"):
            continue
        value = "|".join(flag.choices) or "VALUE"
        value = {"none": "", "one": f" {value}", "optional": f" [{value}]"}[flag.value]
        shown.append((f"  {', '.join(reversed(flag.names))}{value}", flag.help))
    return "\n".join(_hanging(f"{name:<33} ", text) for name, text in shown)


def _hanging(first: str, text: str) -> str:
    """``first`` and then the text, continued under itself (under a fixed indent where ``first`` is long)."""
    indent = " " * (len(first) if len(first) <= 36 else 8)
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def _built_in() -> Path:
    return Path(str(importlib.resources.files("configs")))


def _folders(root: Path) -> list[str]:
    return [folder.name for folder in root.iterdir() if folder.is_dir() and any(folder.glob("*.yaml"))]


def _first_comment(file: Path) -> str:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("#") and not line.startswith("# @"):
                return line.lstrip("# ").strip()
            if line.strip() and not line.startswith("#"):
                break
    return ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"
