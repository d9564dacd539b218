"""The sweep's folder: what lies where in it, how it comes to be, and whose it is.

======================  ==============================================================================
sweep.json              what was asked for: the command, the keys it sweeps over, how jobs are run
jobs/0003/record.jsonl  the job's record (``launcher.sweep.record``)
jobs/0003/config.yaml   its config, fully resolved: what it was checked with and what it runs with
jobs/0003/output.log    what it printed
jobs/0003/run/          its run folder
results.csv             one row a job; results.md the same for reading; report.html the pictures
.lock                   held by the one process that starts jobs
======================  ==============================================================================

A new folder is put together under another name and renamed when it is whole; what a killed program left of one is
removed by the next command that looks for the folder.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from launcher.announce import short
from launcher.errors import ConfigErrors, Problem
from launcher.provenance import hide_override, without_secrets
from launcher.resolved import to_yaml
from launcher.sweep import record
from launcher.sweep.locks import Held, Lock, is_held
from launcher.sweep.plan import Planned
from launcher.sweep.record import Job
from recipes.data.files import expanded

MARKER = "sweep.json"
LOCK_FILE = ".lock"
ROOT = Path("sweeps")
_VERSION = 1
_UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{8}")
_LOCKED_IN_S = 2.0  # after a folder is made, its lock is held


@dataclass(frozen=True)
class Asked:
    """What a sweep was started with.

    swept: its keys. fixed: every other override but those of ``sweep.*``; together they say which sweep this is.
    plugins: digest of each of the user's files, by path. cwd: where it was typed.
    backend: ``local`` or ``slurm``. The rest is as in ``SweepConfig``.
    """

    command: tuple[str, ...]
    cwd: str
    swept: tuple[str, ...]
    fixed: tuple[str, ...]
    plugins: dict[str, str]
    backend: str
    max_parallel: int
    fail_fast: bool
    metric: str | None
    direction: str
    sweeper: str = "grid"
    trials: int = 0
    sampler: str = ""
    sampler_seed: int = 0
    created: str = ""
    version: int = _VERSION


@dataclass(frozen=True)
class Holder:
    """The process that runs a sweep."""

    pid: int
    host: str


class Sweep:
    """A sweep's folder that exists."""

    def __init__(self, path: Path, asked: Asked) -> None:
        self.path, self.asked = path, asked

    def jobs(self) -> list[Job]:
        """Every job, by number, as the records on the disk tell it now."""
        found = (record.read(folder) for folder in (self.path / "jobs").glob("[0-9]*"))
        return sorted((job for job in found if job is not None), key=lambda job: job.number)

    def unreadable(self) -> list[Path]:
        """Folders of jobs whose records do not say what was planned."""
        return sorted(folder for folder in (self.path / "jobs").glob("[0-9]*") if record.read(folder) is None)

    def holder(self) -> Holder | None:
        """Who starts jobs now, None if nobody does."""
        path = self.path / LOCK_FILE
        if not is_held(path):
            return None
        try:
            return Holder(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def add(self, planned: Planned, number: int) -> Job:
        """Puts a job on record. Raises OSError."""
        return _write_job(self.path, planned, number)


def new(path: Path | None, asked: Asked, planned: Sequence[Planned]) -> Sweep:
    """Make the folder with all its jobs, or nothing.

    path: ``sweep.dir``, absent or empty; None: a folder of its own under sweeps/.

    Raises:
        ConfigErrors: the file system refuses.
    """
    if path is None:
        _remove_unfinished(ROOT.absolute())
    final = path or (ROOT / f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}").absolute()
    building = final.with_name(f".{final.name}.{secrets.token_hex(4)}")
    try:
        building.mkdir(parents=True)
        with Lock(building / LOCK_FILE):
            (building / "jobs").mkdir()
            for number, job in enumerate(planned):
                _write_job(building, job, number)
            _write_asked(building, asked)
            os.rename(building, final)
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        raise refusal(final, f"cannot be made: {error.strerror or error}", "a folder that can be written") from None
    return Sweep(final, asked)


def named(text: str) -> Path:
    return expanded(text).absolute()


def _remove_unfinished(parent: Path, name: str | None = None) -> None:
    """What killed programs left of new folders in ``parent``, of this name or of any: nobody holds the lock there."""
    for path in parent.glob(".*"):
        found = _UNFINISHED.fullmatch(path.name)
        if found is None or name not in (None, found[1]):
            continue
        try:
            is_new = time.time() - path.stat().st_mtime < _LOCKED_IN_S
            is_ours = {entry.name for entry in path.iterdir()} <= {"jobs", MARKER, LOCK_FILE}
            if is_ours and not is_new and not is_held(path / LOCK_FILE):
                shutil.rmtree(path)
        except OSError:  # somebody else's, or somebody else removes it
            continue


def find(path: Path) -> Sweep | None:
    """The sweep in ``path``; None where there is nothing yet (no folder, or an empty one).

    Raises:
        ConfigErrors: something else is there.
    """
    _remove_unfinished(path.parent, path.name)
    if path.is_dir() and (path / MARKER).is_file():
        return Sweep(path, _read_asked(path))
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        expected = f"a new folder, or that of a sweep (it holds {MARKER})"
        raise refusal(path, "holds something else than a sweep", expected)
    return None


def existing(path: Path) -> Sweep:
    """Raises ConfigErrors if there is no sweep in ``path``."""
    sweep = find(path)
    if sweep is None:
        raise refusal(path, "holds no sweep", f"the folder of a sweep, with {MARKER} in it")
    return sweep


def in_use(sweep: Sweep) -> ConfigErrors:
    """The refusal for whoever finds the folder's lock held."""
    holder = sweep.holder()
    who = "another program" if holder is None else f"process {holder.pid} on {holder.host}"
    return refusal(
        sweep.path,
        f"is in use: {who} runs its jobs",
        "a sweep that no program is running",
        f"wait for it, or stop it: fsdp-launch action=sweep sweep.dir={short(sweep.path)} sweep.do=cancel",
    )


def refusal(path: Path, what: str, expected: str, remedy: str = "") -> ConfigErrors:
    remedy = remedy or "sweep.dir=PATH names another folder; without it a new one is made under sweeps/"
    return ConfigErrors([Problem(f"the folder {what}", "sweep.dir", str(path), expected=expected, remedy=remedy)])


def same_sweep(before: Asked, now: Asked) -> bool:
    """Whether the same keys are swept over and everything else typed is the same; values may be others."""
    return set(before.swept) == set(now.swept) and set(before.fixed) == set(now.fixed)


@contextmanager
def locked(sweep: Sweep) -> Iterator[None]:
    """While this process runs the sweep's jobs. Raises ConfigErrors if another one does."""
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(Lock(sweep.path / LOCK_FILE))
        except Held:
            raise in_use(sweep) from None
        except OSError as error:
            what = f"cannot be used: {error.strerror or error}"
            raise refusal(sweep.path, what, "a folder that can be written") from None
        lock.write(json.dumps(asdict(Holder(os.getpid(), os.uname().nodename))))
        yield


def _write_job(root: Path, planned: Planned, number: int) -> Job:
    folder = root / "jobs" / f"{number:04d}"
    folder.mkdir(exist_ok=True)  # one that was planned halfway is planned again
    (folder / "config.yaml").write_text(without_secrets(to_yaml(planned.config)), encoding="utf-8")
    record.add(
        folder,
        "planned",
        number=number,
        swept={key: hide_override(f"{key}={value}").partition("=")[2] for key, value in planned.swept.items()},
        overrides=[hide_override(word) for word in planned.overrides],
        content_hash=planned.content_hash,
        num_ranks=planned.config.cluster.nproc_per_node,
        device=planned.config.cluster.device,
        params=dict(planned.params),
    )
    job = record.read(folder)
    assert job is not None
    return job


def _write_asked(path: Path, asked: Asked) -> None:
    text = json.dumps({**asdict(asked), "created": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}, indent=2)
    with (path / MARKER).open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _read_asked(path: Path) -> Asked:
    try:
        fields = json.loads((path / MARKER).read_text(encoding="utf-8"))
        lists = {name: tuple(fields[name]) for name in ("command", "swept", "fixed")}
        return Asked(**{**fields, **lists})
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"has a {MARKER} that cannot be read: {error}"
        raise refusal(path, what, "a sweep of this version") from None
