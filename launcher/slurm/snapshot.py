"""A copy of the code beside the run, made when the job is submitted: edits made while it waits do not reach it."""

from __future__ import annotations

import shutil
from pathlib import Path

import launcher

PACKAGES = ("launcher", "recipes", "fsdp_core", "configs")
_UNWANTED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def take(folder: Path) -> Path:
    """Copies the packages this process runs into ``folder`` and returns it; one that is there already is kept apart
    by its caller: a run that is submitted again gets the code of now.
    """
    root = Path(launcher.__file__).parent.parent
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    for package in PACKAGES:
        shutil.copytree(root / package, part / package, ignore=_not_copied)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return folder


def _not_copied(folder: str, names: list[str]) -> set[str]:
    """Links to nowhere are left out, too: an editor's lock file is one."""
    return _UNWANTED(folder, names) | {name for name in names if not Path(folder, name).exists()}
