"""The folder that a plan or a figure leaves: a new one under plans/ or figures/, or the one that ``run.dir`` names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher import run_folder
from launcher.errors import ConfigErrors, Problem
from launcher.schema import Config
from recipes.data.files import expanded


@dataclass(frozen=True)
class Place:
    """Where answers of one kind go. what: in messages. page: the file by which such a folder is known."""

    what: str
    root: Path
    page: str


PLANS = Place("a plan", Path("plans"), "plan.html")
FIGURES = Place("a figure", Path("figures"), "figure.html")
PAGE = PLANS.page


def plan_folder(config: Config, name: str, place: Place = PLANS) -> Path:
    """Made if it is new. A folder that holds something else than such an answer is left alone.

    Raises:
        ConfigErrors: it cannot be used.
    """
    if config.run.dir is None:
        with run_folder.usable(place.root.absolute()):
            return run_folder.new_folder(config.run.name or name, place.root).absolute()
    named = expanded(config.run.dir).absolute()
    with run_folder.usable(named):
        if named.is_dir() and any(named.iterdir()) and not (named / place.page).exists():
            what = f"the folder holds something else than {place.what}"
            expected = f"a new folder, or one with a {place.page}"
            raise ConfigErrors([Problem(what, "run.dir", str(named), expected=expected)])
        named.mkdir(parents=True, exist_ok=True)
    return named
