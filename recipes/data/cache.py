"""Prepared data on disk: built once, found by content, never half written.

A folder's name is a hash of everything its content follows from (config, file names, sizes and times). It is written
under another name and renamed when complete, so a reader sees all of it or nothing, and a killed run leaves no trace
that another would use. Runs that want the same folder at once wait for the first on a lock file; where the file system
has no locks they build twice and the first rename wins.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from recipes.data.errors import DataError
from recipes.data.files import Key

if TYPE_CHECKING:  # its module loads torch, which this one does without
    from recipes.data.records import PrepareRequest

KEY_FILE = "key.json"


def prepared_folder(request: PrepareRequest, group: str, key: Key, build: Callable[[Path], None]) -> Path:
    """The folder that ``build(folder)`` fills, from the cache if it is there. Every rank calls this.

    The main rank takes the lock, then meets the others in the barrier: they queue behind it at the lock, where waiting
    may take hours, and not in a collective, which would time out. On a host with a cache of its own the first of its
    ranks builds the folder again.
    """
    root = request.cache_dir / group
    if request.is_main:
        return cached_folder(root, key, build, request.report, in_line=request.barrier)
    request.barrier()
    return cached_folder(root, key, build, request.report)


def _nothing() -> None:
    pass


def cached_folder(
    root: Path,
    key: Key,
    build: Callable[[Path], None],
    report: Callable[[str], None],
    in_line: Callable[[], None] = _nothing,
) -> Path:
    """The complete folder of ``key`` under ``root``; raises DataError where it cannot be written.

    ``in_line`` is called once: when others may follow, because this process holds the lock, waits for it or needs none.
    """
    text = json.dumps(key, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    folder = root / digest
    if folder.is_dir():
        in_line()
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / f".{digest}.lock").open("w") as lock:
            is_alone = _locked(lock, report, in_line)
            if is_alone:
                for left_over in root.glob(f".building-{digest}-*"):
                    shutil.rmtree(left_over, ignore_errors=True)
            if not folder.is_dir():
                _build(root, folder, text, build)
            if not is_alone:  # without locks the others wait in the barrier after all
                in_line()
    except OSError as error:
        raise DataError(
            f"cannot prepare data in {root}: {error.strerror or error} ({error.filename or folder}). "
            "Set data.cache_dir to a folder with enough room that you may write to"
        ) from error
    return folder


def _build(root: Path, folder: Path, key_text: str, build: Callable[[Path], None]) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=f".building-{folder.name}-", dir=root))
    try:
        build(unfinished)
        (unfinished / KEY_FILE).write_text(key_text + "\n")
        for path in unfinished.rglob("*"):
            _flush_to_disk(path)
        unfinished.chmod(0o755)  # mkdtemp made it private; a shared cache is readable
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another run was first: its content is the same
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _flush_to_disk(path: Path) -> None:
    """Before the rename: after a power cut, a complete name must not hold incomplete files."""
    if path.is_file():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _locked(lock: TextIO, report: Callable[[str], None], in_line: Callable[[], None]) -> bool:
    """Take the lock, which closing the file or dying gives back. False where the file system knows no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        report("another process is preparing the same data; waiting for it")
        in_line()
        fcntl.flock(lock, fcntl.LOCK_EX)
        return True
    except OSError:
        return False
    in_line()
    return True
