"""docs/experiments.md: the tables of the newest results, between the marks ``<!-- NAME -->`` and ``<!-- /NAME -->``."""

from __future__ import annotations

import json
import re
from pathlib import Path

_MARKED = re.compile(r"<!-- (\w+) -->\n.*?<!-- /\1 -->\n", re.DOTALL)
BUSY = 1.0  # load before an experiment begins; above it times are marked


def with_results(text: str, results: Path, way_there: str) -> str:
    """The page with every marked part made anew. way_there: from the page's folder to ``results``."""
    return _MARKED.sub(lambda found: _part(found[1], results, way_there), text)


def _part(name: str, results: Path, way_there: str) -> str:
    files = sorted(results.glob(f"*-paper-{name}.md"))
    if not files:
        return f"<!-- {name} -->\nNot measured yet.\n<!-- /{name} -->\n"
    file = files[-1]
    facts = json.loads(file.with_suffix(".json").read_text())["conditions"]
    body = file.read_text()
    body = body[body.index("**Conditions.** ") + len("**Conditions.** ") :].strip().replace("\n### ", "\n**")
    body = re.sub(r"^(\*\*[^*\n]+)$", r"\1**", body, flags=re.MULTILINE)
    load = facts["load_at_start"]
    noise = f" Other work ran beside it (load {load:.1f} at the start): take times with care." if load > BUSY else ""
    lines = [
        f"<!-- {name} -->",
        f"[{facts['date'][:10]}]({way_there}/{file.name}), {facts['processor']}.{noise} {body}",
    ]
    picture = file.with_suffix(".png")
    if picture.exists():
        lines += ["", f"![{name}]({way_there}/{picture.name})"]
    return "\n".join([*lines, f"<!-- /{name} -->", ""])
