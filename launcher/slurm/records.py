"""What a job leaves in its run folder, so that its story can be told without SLURM's accounting.

=========================================  =========================================================================
slurm/jobs.jsonl                           one line for each submission (before it, and with its job), start and end,
                                           never rewritten
slurm/submission                           which submission is the latest: a job of an earlier one runs nothing
slurm/job.sh                               the script
slurm/ends/JOB.RESTART/rank_N.json         how a rank ended, by the process that kept it: of every rank that failed,
                                           and of rank 0
=========================================  =========================================================================
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher.failure import Failure
from launcher.files import append_line, read_lines, write_whole

FOLDER = "slurm"
SCRIPT, SUBMISSION = Path(FOLDER) / "job.sh", Path(FOLDER) / "submission"
_JOBS = "jobs.jsonl"
DONE, SAVED, FAILED = "done", "saved", "failed"  # how one rank ended
_LOST = "lost"  # of ``states``, which reads this module


@dataclass(frozen=True)
class RankEnd:
    """how: done, saved (on a signal; the run can go on), failed; then ``failure`` says why."""

    rank: int
    how: str
    failure: Failure | None = None
    host: str = ""


@dataclass(frozen=True)
class Ended:
    """How one start of a job ended. state: as in ``states``; why: one line for people; requeued: it will go on."""

    state: str
    exit_code: int
    why: str
    requeued: bool = False
    failure: Failure | None = None


@dataclass(frozen=True)
class Story:
    """A run's jobs, read back.

    job: id of the latest submission (``12`` or ``12_3``), None if it was never submitted.
    restart: of its latest start; None before the first.
    ended: the end of that start, None while it runs or if nothing could record it.
    num_saves, num_crashes, num_lost: starts of this job that went back to the queue after saving, after a crash, with
        a lost node.
    is_submitting: a submission was begun and nobody knows whether SLURM has taken it.
    original: the folder that the job was submitted from and works in, where this one is a copy of it; None otherwise.
    """

    job: str | None = None
    restart: int | None = None
    ended: Ended | None = None
    num_saves: int = 0
    num_crashes: int = 0
    num_lost: int = 0
    is_submitting: bool = False
    original: str | None = None


def add(run_dir: Path, event: str, **facts: Any) -> None:
    """One more line, on the disk when this returns."""
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    where = str(run_dir.absolute())
    append_line(folder / _JOBS, {"event": event, "time": time.time(), "folder": where, **facts})


def next_submission(run_dir: Path) -> str:
    """What tells the next submission of this run from the ones before it."""
    before = [line for line in read_lines(run_dir / FOLDER / _JOBS) if line.get("event") == "submitting"]
    return str(len(before) + 1)


def begin_submission(run_dir: Path, submission: str) -> None:
    """From here on jobs of earlier submissions run nothing. To be called before sbatch; afterwards ``submitted`` or
    ``refused`` is added."""
    add(run_dir, "submitting", submission=submission)
    write_whole(run_dir / SUBMISSION, submission + "\n")


def add_end(run_dir: Path, job: str, restart: int, ended: Ended) -> None:
    add(run_dir, "ended", job=job, restart=restart, **asdict(ended))


def story(run_dir: Path) -> Story:
    """The latest submission's story; lines that a crash cut short are passed over."""
    told = Story()
    for line in read_lines(run_dir / FOLDER / _JOBS):
        try:
            told = _after(told, line)
        except (KeyError, TypeError, ValueError):  # a damaged line
            continue
    return told if told.original is None or _is_copy(run_dir, told.original) else replace(told, original=None)


def write_rank_end(run_dir: Path, job: str, restart: int, end: RankEnd) -> None:
    """Whole or not at all."""
    folder = _ends(run_dir, job, restart)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"rank_{end.rank}.json", json.dumps(asdict(end)))


def rank_ends(run_dir: Path, job: str, restart: int) -> list[RankEnd]:
    ends = []
    for path in sorted(_ends(run_dir, job, restart).glob("rank_*.json")):
        fields = json.loads(path.read_text())
        failure = fields.pop("failure")
        ends.append(RankEnd(**fields, failure=None if failure is None else Failure(**failure)))
    return ends


def _after(told: Story, line: dict[str, Any]) -> Story:
    event = line["event"]
    if event in ("submitting", "refused"):
        return replace(told, is_submitting=event == "submitting")
    if event in ("submitted", "started") and line["job"] != told.job:  # a job may start before its submitter writes
        told = Story(job=str(line["job"]), original=line.get("folder"))
    if event == "submitted":
        return replace(told, is_submitting=False)
    if event == "started" and line["job"] == told.job:
        return replace(told, restart=int(line["restart"]), ended=None)
    if event == "ended" and line["job"] == told.job and line["restart"] >= (told.restart or 0):
        return _with_end(told, line)  # not the end of a start that was cut off and replaced
    return told


def _is_copy(run_dir: Path, original: str) -> bool:
    """A folder that was moved is no copy: its original is gone."""
    try:
        return not run_dir.samefile(original)
    except OSError:
        return False


def _ends(run_dir: Path, job: str, restart: int) -> Path:
    return run_dir / FOLDER / "ends" / f"{job}.{restart}"


def _with_end(told: Story, line: dict[str, Any]) -> Story:
    fields = {name: line[name] for name in ("state", "exit_code", "why", "requeued")}
    failure = line.get("failure")
    ended = Ended(**fields, failure=None if failure is None else Failure(**failure))
    told = replace(told, restart=int(line["restart"]), ended=ended)
    if not ended.requeued:
        return told
    if ended.failure is not None:
        return replace(told, num_crashes=told.num_crashes + 1)
    if ended.state == _LOST:
        return replace(told, num_lost=told.num_lost + 1)
    return replace(told, num_saves=told.num_saves + 1)
