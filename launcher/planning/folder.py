"""The folder that a plan leaves: a new one under plans/, or the one that ``run.dir`` names."""

from __future__ import annotations

from pathlib import Path

from launcher import run_folder
from launcher.errors import ConfigErrors, Problem
from launcher.schema import Config
from recipes.data.files import expanded

ROOT = Path("plans")
PAGE = "plan.html"


def plan_folder(config: Config, name: str) -> Path:
    """Made if it is new. A folder that holds something else than a plan is left alone.

    Raises:
        ConfigErrors: it cannot be used.
    """
    if config.run.dir is None:
        with run_folder.usable(ROOT.absolute()):
            return run_folder.new_folder(config.run.name or name, ROOT).absolute()
    named = expanded(config.run.dir).absolute()
    with run_folder.usable(named):
        if named.is_dir() and any(named.iterdir()) and not (named / PAGE).exists():
            what = "the folder holds something else than a plan"
            raise ConfigErrors([Problem(what, "run.dir", str(named), expected=f"a new folder, or one with a {PAGE}")])
        named.mkdir(parents=True, exist_ok=True)
    return named
