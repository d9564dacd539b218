"""What was measured as a preset of the group ``hardware``: values with how they came about, in YAML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GROUP = "hardware"


@dataclass(frozen=True)
class Value:
    """One key. value: None where it was not measured; about: how it came about, or why not."""

    key: str
    value: float | int | str | None
    about: str = ""

    @property
    def text(self) -> str:
        if self.value is None:
            return "null"
        if isinstance(self.value, float):
            return f"{self.value:.4g}" if "e" not in f"{self.value:.4g}" else _exponent(self.value)
        return str(self.value)


def yaml_of(values: Sequence[Value], what: str, config_dir: Path, name: str) -> str:
    """what: one line about the machine and the date."""
    lines = [f"# {what}", f"# fsdp-launch --config-dir {config_dir} {GROUP}={name}"]
    lines += [f"{one.key}: {one.text}" + (f"  # {one.about}" if one.about else "") for one in values]
    return "\n".join(lines) + "\n"


def table_of(values: Sequence[Value]) -> str:
    keys, texts = max(len(one.key) for one in values), max(len(one.text) for one in values)
    return "\n".join(f"{one.key:<{keys}}  {one.text:<{texts}}  {one.about}".rstrip() for one in values)


def write(folder: Path, name: str, text: str) -> Path:
    """``<folder>/hardware/<name>.yaml``."""
    path = folder / GROUP / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _exponent(value: float) -> str:
    """YAML 1.1 reads a number with an exponent only if it has a point and a sign."""
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa}e{int(exponent):+03d}"
