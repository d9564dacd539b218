"""Which attempt of a run may complete checkpoints. No torch here.

A rank of an earlier attempt can live on for a while: behind a cut cable, in a save that takes minutes. ``attempt.json``
names the attempt that has taken the folder over, with a random token; a save is completed only while the token is its
own, and looking and renaming are one step under a lock. Where the file system has no locks, the look alone remains.
"""

from __future__ import annotations

import fcntl
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.checkpoint.errors import Superseded

_FILE, _LOCK = "attempt.json", ".lock"


class Fence:
    """Of one ``checkpoints`` folder, for one process of an attempt (rank 0)."""

    def __init__(self, root: Path, attempt: int) -> None:
        self.root, self.attempt = root, attempt
        self.token = secrets.token_hex(4)

    def claim(self) -> None:
        """Take the folder over from earlier attempts (or from an earlier start with the same number).

        Raises:
            Superseded: a later attempt has it. OSError: it cannot be written.
        """
        with self._locked():
            holder = self._holder()
            if holder is not None and holder[0] > self.attempt:
                raise self._superseded(holder[0])
            path = self.root / _FILE
            growing = path.with_name(f".{_FILE}.{self.token}")
            growing.write_text(json.dumps({"attempt": self.attempt, "token": self.token}) + "\n")
            growing.rename(path)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no other attempt can take the folder over. Raises Superseded where one has."""
        with self._locked():
            holder = self._holder()
            if holder is not None and holder != (self.attempt, self.token):
                raise self._superseded(holder[0])
            yield

    def _holder(self) -> tuple[int, str] | None:
        return _holder(self.root)

    def _superseded(self, holder: int) -> Superseded:
        return Superseded(
            f"{self.root}: attempt {holder} of this run has taken over from attempt {self.attempt}; what this one has "
            "not saved yet is not saved any more"
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.root / _LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                pass  # a file system without locks
            yield


def latest_attempt(root: Path) -> int:
    """Number of the attempt that has this ``checkpoints`` folder; 0 where none has, or none can be told."""
    try:
        holder = _holder(root)
    except OSError:
        holder = None  # the attempt itself will say what is wrong with the folder
    return 0 if holder is None else holder[0]


def _holder(root: Path) -> tuple[int, str] | None:
    try:
        facts = json.loads((root / _FILE).read_text())
        return int(facts["attempt"]), str(facts["token"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return None  # cut by a dying machine: the next claim writes it anew
