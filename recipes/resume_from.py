"""From which checkpoint a run goes on, decided at its start from what lies on the disk. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipes.checkpoint.errors import CheckpointError, DamagedCheckpoint
from recipes.checkpoint.folder import (
    ROOT_NAME,
    checkpoints_of,
    is_named_otherwise,
    look_at,
    step_folders,
    step_of,
)
from recipes.data.files import expanded

AUTO, NEVER = "auto", "never"


@dataclass(frozen=True)
class Candidate:
    """A folder named like a checkpoint; whether it is a whole one has not been looked at."""

    step: int
    path: Path


def candidates(resume: str, run_dir: Path) -> list[Candidate]:
    """Newest first; the run goes on from the first that is whole. Empty: it starts at its first step.

    The run's own checkpoints come before a named one: whoever starts the same command again after a stop wants to go
    on, not back. ``never`` says nothing here: what an earlier start left has been set aside then (``set_aside``), and
    what is there was saved by this one.

    Raises:
        CheckpointError: ``resume`` names a place without checkpoints.
    """
    own = in_folder(checkpoints_of(run_dir))
    if own or resume in (AUTO, NEVER):
        return own
    return named(resume)


def named(path: str) -> list[Candidate]:
    """Of ``checkpoint.resume=PATH``: one checkpoint, whatever its folder is called, or those of a run folder or of its
    ``checkpoints`` folder.

    Raises:
        CheckpointError: there are none.
    """
    place = expanded(path).absolute()
    step = step_of(place)
    if step is not None:
        found = [Candidate(step, place)] if place.is_dir() else []
    elif is_named_otherwise(place):
        found = [Candidate(_step_inside(place), place)]
    else:
        found = in_folder(place) or in_folder(place / ROOT_NAME)
    if not found:
        what = "holds no checkpoint" if place.is_dir() else "is no folder"
        expected = "expected a run folder, or one of its checkpoints (step_...)"
        raise CheckpointError(f"checkpoint.resume={path} {what}: {expected}")
    return found


def _step_inside(place: Path) -> int:
    """0 where it cannot be told: the start says why the checkpoint is none."""
    try:
        return look_at(place).step
    except DamagedCheckpoint:
        return 0


def in_folder(folder: Path) -> list[Candidate]:
    """Those of one ``checkpoints`` folder, newest first."""
    return [Candidate(step, path) for step, path in reversed(step_folders(folder))]


def to_set_aside(resume: str, run_dir: Path) -> list[Path]:
    """The run's own checkpoints that a start with ``resume`` takes back: all of them with ``never``, the newer ones
    where a checkpoint of this very run is named. A later start would go on from them instead.

    Raises:
        CheckpointError: as ``named``.
    """
    own = in_folder(checkpoints_of(run_dir))
    if resume == NEVER:
        return [one.path for one in own]
    if resume == AUTO or not own:
        return []
    first = named(resume)[0]
    is_own = any(one.path.samefile(first.path) for one in own)
    return [one.path for one in own if one.step > first.step] if is_own else []
