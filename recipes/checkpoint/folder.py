"""Names in ``run.dir/checkpoints``, and which checkpoints are complete. No torch here.

==========================================  ========================================================================
checkpoints/step_00000120/                  a checkpoint after 120 steps
  manifest.json                             what it holds and where (``recipes.checkpoint.manifest``)
  rank_00003.safetensors                    what rank 3 wrote
  COMPLETE                                  written last; says how long the manifest is and its checksum
checkpoints/.step_00000120.attempt_2.XXXX/  a save under way, of attempt 2, or one that was cut short
checkpoints/.step_00000120.old/             the checkpoint that a new save of the same step replaces
checkpoints/.removing_step_00000080/        one that is being removed
checkpoints/attempt.json, .lock             which attempt may write (``recipes.checkpoint.fence``)
==========================================  ========================================================================

A reader takes a folder only by its final name, and only with a marker that fits its manifest.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from recipes.checkpoint.checksum import checksum
from recipes.checkpoint.errors import DamagedCheckpoint

ROOT_NAME = "checkpoints"
MANIFEST, COMPLETE = "manifest.json", "COMPLETE"
SAVE_TIME_FILE = "save_seconds.txt"  # in the run folder: what the latest save took
_FINAL = re.compile(r"step_(\d{8,})")
_REPLACED = re.compile(r"\.(step_\d{8,})\.old")
_PARTIAL = re.compile(r"\.step_\d{8,}\.attempt_\d+\.\w+")
_REMOVED = re.compile(r"\.removing_step_\d{8,}")


@dataclass(frozen=True)
class Found:
    """A complete checkpoint. eval_loss: of the evaluation at its step, if there was one."""

    step: int
    path: Path
    eval_loss: float | None = None


def checkpoints_of(run_dir: Path) -> Path:
    return run_dir / ROOT_NAME


def final_name(step: int) -> str:
    return f"step_{step:08d}"


def partial_name(step: int, attempt: int, token: str) -> str:
    return f".{final_name(step)}.attempt_{attempt}.{token}"


def replaced_name(final: str) -> str:
    return f".{final}.old"


def removed_name(final: str) -> str:
    return f".removing_{final}"


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def step_of(path: Path) -> int | None:
    """By its final name; whether the folder holds a checkpoint is not looked at."""
    match = _FINAL.fullmatch(path.name)
    return None if match is None else int(match[1])


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything in a ``checkpoints`` folder that is named like a checkpoint, oldest step first."""
    steps = [(step_of(path), path) for path in _entries(root)]
    return sorted((step, path) for step, path in steps if step is not None)


def complete_checkpoints(root: Path) -> list[Found]:
    """Of a ``checkpoints`` folder, oldest step first; empty where there is none."""
    found = []
    for _, path in step_folders(root):
        try:
            found.append(look_at(path))
        except DamagedCheckpoint:
            continue
    return sorted(found, key=lambda one: one.step)


def newest_complete(root: Path) -> Found | None:
    return next(reversed(complete_checkpoints(root)), None)


def is_named_otherwise(path: Path) -> bool:
    """Whether a folder without a checkpoint's name holds one, whole or not: a copy that somebody called ``best``."""
    return step_of(path) is None and ((path / MANIFEST).exists() or (path / COMPLETE).exists())


def is_complete(path: Path) -> bool:
    """Whether the marker is there and fits the manifest; the tensors' files are ``CheckpointReader.verify``'s part."""
    try:
        look_at(path)
    except DamagedCheckpoint:
        return False
    return True


def look_at(path: Path) -> Found:
    """What the marker says.

    Raises:
        DamagedCheckpoint: why this folder is no complete checkpoint.
    """
    marker_path = path / COMPLETE
    try:
        marker = json.loads(marker_path.read_text())
        step, size, expected, loss = (
            marker[name] for name in ("step", "manifest_bytes", "manifest_checksum", "eval_loss")
        )
        manifest = (path / MANIFEST).read_bytes()
    except FileNotFoundError as missing:
        raise DamagedCheckpoint(
            f"{path}: no complete checkpoint: {Path(str(missing.filename)).name} is missing; a save that was cut short "
            "leaves such a folder, and so does an unfinished copy"
        ) from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise DamagedCheckpoint(f"{marker_path}: not what a save leaves there; copy the checkpoint again") from None
    if (len(manifest), checksum(manifest)) != (size, expected):
        raise DamagedCheckpoint(
            f"{path / MANIFEST}: {size} bytes with checksum {expected} were written, {len(manifest)} bytes with "
            f"{checksum(manifest)} are there; the file was changed or cut"
        )
    named = step_of(path)
    if named is not None and named != step:
        raise DamagedCheckpoint(
            f"{path}: holds step {step}, and is named as step {named}: it was renamed or copied under another name; "
            f"expected {final_name(int(step))}"
        )
    return Found(int(step), path, loss)


def marker_text(step: int, manifest: bytes, eval_loss: float | None) -> str:
    """Content of COMPLETE."""
    facts = {"step": step, "manifest_bytes": len(manifest), "manifest_checksum": checksum(manifest)}
    return json.dumps({**facts, "eval_loss": eval_loss}) + "\n"


@dataclass(frozen=True)
class Leftovers:
    """What saves that were cut short left. useless: to be removed. replaced: (kept copy, its final name) to put back,
    where the checkpoint that was to replace it never came."""

    useless: list[Path]
    replaced: list[tuple[Path, Path]]


def leftovers(root: Path) -> Leftovers:
    useless, replaced = [], []
    for path in _entries(root):
        if _PARTIAL.fullmatch(path.name) or _REMOVED.fullmatch(path.name):
            useless.append(path)
        elif match := _REPLACED.fullmatch(path.name):
            final = root / match[1]
            if is_complete(final) or not is_complete(path):
                useless.append(path)
            else:
                replaced.append((path, final))
    return Leftovers(useless, replaced)


def _entries(root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
