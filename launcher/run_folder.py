"""The run folder: decided once, by one process, and what lies where in it.

======================  ============================================================================
config.yaml             the composed config, fully resolved; values of secret variables are hidden
overrides.yaml          what was typed after the command
command.txt             the command line and the folder it was typed in
revision.txt            the code's git revision, if it is a checkout
diff.patch              uncommitted changes to the code's tracked files
packages.txt            installed packages and their versions
environment.json        Python, machine, GPUs, and the variables that steer training
plugins/                copies of the plugin files
logs/rank_N.log         what rank N wrote, attempt after attempt
flight/rank_N.bin       the last events of rank N, for the report of a hang
attempt                 how many times ranks were started in this folder
earlier/N/              the files above from an earlier start in the same folder
eval/, generate/        a folder like this for each use of the run
======================  ============================================================================

The recipe adds metrics, pictures, profiles and checkpoints.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType

from launcher.errors import ConfigErrors, Problem
from launcher.files import write_whole
from launcher.request import LaunchRequest
from launcher.schema import Config
from recipes.checkpoint.fence import latest_attempt
from recipes.checkpoint.folder import checkpoints_of
from recipes.data.files import expanded

CONFIG_FILE = "config.yaml"
_ROOT = Path("runs")
_LOCK_FILE = ".lock"
_ATTEMPT_FILE = "attempt"
_LONGEST_NAME = 80  # characters of the run's name in the folder's: file systems take 255 in all


def rank_log(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank_{rank}.log"


def flight_folder(run_dir: Path) -> Path:
    return run_dir / "flight"


def decide(config: Config, request: LaunchRequest) -> Path:
    """The run's folder, absolute, made if it is new; to be called by one process of the run.

    Raises:
        ConfigErrors: ``run.dir`` cannot be used, or no new folder can be made here.
    """
    is_training = config.action == "train"
    if config.run.dir is not None:
        named = expanded(config.run.dir).absolute()
        with usable(named):
            if not is_training and (named / CONFIG_FILE).exists():  # a use of that run: its own files stay as they are
                return create(config.model.kind, named / config.action)
            return open_named(named)
    with usable(_ROOT.absolute()):
        name = config.run.name or (request.choices.get("model") if is_training else None) or config.model.kind
        return create(name if is_training else f"{config.action}_{name}").absolute()


@contextmanager
def usable(run_dir: Path) -> Iterator[None]:
    """What the file system refuses in this block (no permission, no space) is told as the run folder's problem.

    Raises:
        ConfigErrors: for every OSError.
    """
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename and str(error.filename) != str(run_dir) else ""
        what = f"cannot be used: {error.strerror or error}{where}"
        raise _refusal(run_dir, what, "a folder that can be written, on a file system with space left") from None


def create(name: str, root: Path = _ROOT, now: datetime | None = None) -> Path:
    """A new run's folder, see ``new_folder``."""
    folder = new_folder(name, root, now)
    (folder / "logs").mkdir()
    return folder


def new_folder(name: str, root: Path, now: datetime | None = None) -> Path:
    """``<root>/<date>-<name>-<unique>``; whoever makes it owns it, so two runs never share one."""
    stamp = (now or datetime.now()).strftime("%Y-%m-%d_%H-%M-%S")
    root.mkdir(parents=True, exist_ok=True)
    while True:
        folder = root / f"{stamp}-{_plain(name)[:_LONGEST_NAME]}-{secrets.token_hex(2)}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder


def open_named(run_dir: Path) -> Path:
    """The folder the user named: made if it is new, continued if it is a run folder.

    Raises:
        ConfigErrors: it is a file, or holds something else than a run.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise _refusal(run_dir, "is a file", "a new folder, or the folder of an earlier run")
    if run_dir.is_dir() and not _is_a_runs(run_dir):
        raise _refusal(run_dir, "is not empty and holds no run", f"an empty folder, or one with a {CONFIG_FILE}")
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    return run_dir


def _is_a_runs(run_dir: Path) -> bool:
    """Empty, or a run's; also one whose start was killed before, or while, its config was written."""
    names = {path.name for path in run_dir.iterdir()}
    return bool(names & {CONFIG_FILE, _ATTEMPT_FILE, _LOCK_FILE}) or names <= {"logs"}


class Lock:
    """Held while a run uses its folder: two runs that name the same ``run.dir`` must not write into each other.

    The kernel lets go of it when the process ends, however it ends.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._fd = -1

    def __enter__(self) -> Lock:
        with usable(self._run_dir):
            self._fd = os.open(self._run_dir / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise _refusal(self._run_dir, "is in use by another run", "a folder that no run is using") from None
        except OSError:
            pass  # a file system without locks: nothing can be promised there
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._fd)


def next_attempt(run_dir: Path) -> int:
    """Counts up how often ranks were started in this folder, from 1; to be called while the lock is held.

    Whatever an attempt writes carries its number, so that ranks of an older one that linger can be told apart.
    Never below what the checkpoints there know of: the file may be gone, or they may come from another folder.
    Raises OSError if the count cannot be kept, ConfigErrors if the file holds something else than a count.
    """
    path = run_dir / _ATTEMPT_FILE
    before = path.read_text(errors="replace").strip() if path.exists() else "0"
    if not (before.isascii() and before.isdecimal()):
        raise _refusal(
            run_dir, f"has a damaged file {path.name}", "the number of attempts so far in it, or no such file"
        )
    attempt = max(int(before), latest_attempt(checkpoints_of(run_dir))) + 1
    write_whole(path, f"{attempt}\n")
    return attempt


def discard_if_unused(run_dir: Path) -> None:
    """Remove a folder in which nothing was written but what opening it leaves: a start that failed has no run."""
    if (run_dir / CONFIG_FILE).exists():
        return
    try:
        (run_dir / "logs").rmdir()
        (run_dir / _LOCK_FILE).unlink(missing_ok=True)
        run_dir.rmdir()
    except OSError:
        pass  # there is something else in it


def begin_logs(run_dir: Path, ranks: Iterable[int], attempt: int) -> None:
    """A line in each log that goes on from an earlier attempt."""
    for rank in ranks:
        path = rank_log(run_dir, rank)
        if path.exists() and path.stat().st_size:
            with path.open("a") as log:
                log.write(f"--- attempt {attempt}, {datetime.now():%Y-%m-%d %H:%M:%S} ---\n")


def _plain(name: str) -> str:
    """Only characters that need no quoting in a shell."""
    return re.sub(r"[^A-Za-z0-9._]+", "_", name).strip("._") or "run"


def _refusal(run_dir: Path, what: str, expected: str) -> ConfigErrors:
    return ConfigErrors(
        [
            Problem(
                key="run.dir",
                what=f"the folder {what}",
                got=str(run_dir),
                expected=expected,
                remedy="run.dir=PATH names another folder; without run.dir a new one is made under runs/",
            )
        ]
    )
