"""Prepared data on disk: built once, found by content, never half written.

A folder's name is a hash of everything its content follows from (config, file names, sizes and times). It is written
under another name and renamed when complete, so a reader sees all of it or nothing, and a killed run leaves no trace
that another would use. Runs that want the same folder at once wait for the first on a lock file; where the file system
has no locks they build twice and the first rename wins.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from recipes.data.errors import DataError
from recipes.data.files import Key
from recipes.data.records import PrepareRequest

KEY_FILE = "key.json"


def prepared_folder(request: PrepareRequest, group: str, key: Key, build: Callable[[Path], None]) -> Path:
    """The folder that ``build(folder)`` fills, from the cache if it is there. Every rank calls this.

    The main rank builds while the others wait in the barrier; then each of them finds the folder, or, on a host with a
    cache of its own, the first of that host builds it again.
    """
    if request.is_main:
        folder = cached_folder(request.cache_dir / group, key, build, request.report)
    request.barrier()
    if not request.is_main:
        folder = cached_folder(request.cache_dir / group, key, build, request.report)
    return folder


def cached_folder(root: Path, key: Key, build: Callable[[Path], None], report: Callable[[str], None]) -> Path:
    """The complete folder of ``key`` under ``root``; raises DataError where it cannot be written."""
    text = json.dumps(key, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    folder = root / digest
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _only_one(root / f".{digest}.lock", report) as is_alone:
            if is_alone:
                for left_over in root.glob(f".building-{digest}-*"):
                    shutil.rmtree(left_over, ignore_errors=True)
            if not folder.is_dir():
                _build(root, folder, text, build)
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
        for path in unfinished.iterdir():
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


@contextlib.contextmanager
def _only_one(lock_file: Path, report: Callable[[str], None]) -> Iterator[bool]:
    """Hold the lock; yields False where the file system knows no locks. A dead holder's lock is free."""
    with lock_file.open("w") as lock:
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report("another run is preparing the same data; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            is_alone = True
        except OSError:
            is_alone = False
        yield is_alone
