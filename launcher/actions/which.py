"""Which checkpoint an action works on: the one that ``checkpoint.resume`` names, else the newest of ``run.dir``."""

from __future__ import annotations

from pathlib import Path

from launcher.announce import say
from launcher.errors import ConfigErrors, Problem
from recipes.checkpoint.errors import DamagedCheckpoint
from recipes.checkpoint.folder import COMPLETE, MANIFEST, Found, checkpoints_of, look_at, step_folders
from recipes.data.files import expanded

_WORDS = ("auto", "never")
_REMEDY = "checkpoint.resume=PATH names a checkpoint or a run folder, run.dir=PATH a run folder"


def chosen(resume: str, run_dir: str | None) -> Found:
    """A complete one.

    resume, run_dir: as in ``checkpoint.resume`` and ``run.dir``.

    Raises:
        ConfigErrors: none is named, there is none, or the one that is named is incomplete.
    """
    if resume in _WORDS and run_dir is None:
        raise _refusal("checkpoint.resume", "no checkpoint is named", resume, "a checkpoint, or a run folder with one")
    key, path = ("run.dir", run_dir or "") if resume in _WORDS else ("checkpoint.resume", resume)
    place = expanded(path).absolute()
    if not place.is_dir():
        what = "this is a file" if place.exists() else "no such folder"
        raise _refusal(key, what, path, "a checkpoint (step_...), or a run folder with one")
    if (place / MANIFEST).exists() or (place / COMPLETE).exists() or place.name.startswith("step_"):
        try:
            return look_at(place)
        except DamagedCheckpoint as damage:
            raise _refusal(key, str(damage), path, "a complete checkpoint") from None
    return _newest(place, key, path)


def _newest(place: Path, key: str, path: str) -> Found:
    """Of a run folder, or of its ``checkpoints`` folder. Newer ones that are not complete are told."""
    for _, folder in reversed(step_folders(checkpoints_of(place)) or step_folders(place)):
        try:
            found = look_at(folder)
        except DamagedCheckpoint as damage:
            say(f"checkpoint passed over: {damage}")
        else:
            return found
    raise _refusal(key, "the folder holds no complete checkpoint", path, "a run that was saved (checkpoint.every)")


def _refusal(key: str, what: str, got: str, expected: str) -> ConfigErrors:
    return ConfigErrors([Problem(what, key, got, expected=expected, remedy=_REMEDY)])
