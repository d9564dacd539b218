"""docs/engine.md keeps its word: signatures, the changes to the plain script, and the tests it points to."""

from __future__ import annotations

import difflib
import inspect
import re
from pathlib import Path
from typing import Any

import fsdp_core
from fsdp_core.policy import RateLimit

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "engine.md").read_text()
SCRIPT = ROOT / "examples" / "plain_script.py"


def plain_script() -> str:
    """The script before it was sharded, as the page prints it."""
    found = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def changes(before: str, after: str) -> str:
    """Lines that differ, without the docstring on top of ``after``."""
    after = after[after.index("import os") :]
    rows = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return "\n".join("" if row.startswith("@@") else row for row in list(rows)[3:])


def signature_of(thing: Any) -> str:
    """Names and defaults, without types."""
    signature = inspect.signature(thing)
    bare = []
    for parameter in signature.parameters.values():
        parameter = parameter.replace(annotation=inspect.Parameter.empty)
        if parameter.default == RateLimit():
            parameter = parameter.replace(default=_Text("RateLimit()"))
        bare.append(parameter)
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


class _Text(str):
    def __repr__(self) -> str:
        return str(self)


def test_the_page_shows_all_that_changed() -> None:
    found = re.search(r"```diff\n(.*?)\n```", PAGE, re.DOTALL)
    assert found is not None
    assert found[1] == changes(plain_script(), SCRIPT.read_text())


def test_every_public_name_is_there_with_its_arguments() -> None:
    rows = re.findall(r"^\| `(\w+)(\(.*\))` \| \S", PAGE[PAGE.index("## Every public name") :], re.MULTILINE)
    assert dict(rows) == {name: signature_of(getattr(fsdp_core, name)) for name in fsdp_core.__all__}


def test_every_test_it_names_exists() -> None:
    found = re.findall(r"\[`(test_\w+)`\]\(\.\./([^)]+)\)", PAGE)
    assert len(found) > 50
    missing = [(name, path) for name, path in found if f"\ndef {name}(" not in (ROOT / path).read_text()]
    assert not missing
