"""What the launcher left in the run folder about code, packages, machine and command, for loggers that keep it too."""

from __future__ import annotations

import json
from pathlib import Path

_LONGEST_DIFF = 20_000  # characters; the run folder has all of it


def recorded_provenance(run_dir: Path) -> dict[str, object]:
    """Plain data; what is not there is left out. The launcher has hidden secrets before it wrote the files."""
    found: dict[str, object] = {}
    for name, file in (("command", "command.txt"), ("revision", "revision.txt"), ("diff", "diff.patch")):
        text = _text(run_dir / file)
        if text:
            cut = f"\n... {len(text) - _LONGEST_DIFF} more characters in {file}" if len(text) > _LONGEST_DIFF else ""
            found[name] = text[:_LONGEST_DIFF] + cut
    packages = [line.partition("==") for line in _text(run_dir / "packages.txt").splitlines()]
    if packages:
        found["packages"] = {name: version for name, _, version in packages}
    machine = _text(run_dir / "environment.json")
    if machine:
        found["environment"] = json.loads(machine)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
