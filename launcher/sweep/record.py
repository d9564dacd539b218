"""One job's record: a file of lines that only grows. What the job is now follows from reading all of them.

=========  ==================================================  ======================================
event      written by                                          says
=========  ==================================================  ======================================
planned    the command that made the sweep                     number, swept values, hash of the config
claimed    whoever starts the job, before it starts            attempt, backend
released   the same, if nothing could be started
submitted  the SLURM backend                                   SLURM's id
started    the job's own process                               host, process id
ended      the job's own process; where that could not say     state, exit code, first failing rank and
           it, whoever finds that it is gone                    its error, what was measured
=========  ==================================================  ======================================

A line is written by one ``write`` and is on the disk before anything happens that it announces, so a program killed
at any moment leaves a record that is whole but for its last line, and a torn last line is passed over.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.files import append_line, read_lines
from launcher.sweep import states

FILE = "record.jsonl"
LOCK_FILE = ".lock"  # held by the job's own process while it lives


@dataclass(frozen=True)
class End:
    """How one attempt ended.

    rank, error: the first rank that failed and what it said; None and empty otherwise.
    measures: what results are made of, by column: metrics, seconds, bytes (``launcher.sweep.measures``).
    """

    state: str
    exit_code: int | None
    rank: int | None = None
    error: str = ""
    measures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A job as its record tells it.

    folder: ``jobs/0003`` of the sweep. swept: the values that set it apart, by key, as typed.
    overrides: every override of its config. content_hash: of its config; equal hashes are one experiment.
    params: what a search chose, as the search wants it back; empty in a grid.
    num_ranks, device: of its config, for whoever divides the machine.
    attempt: how often it was claimed. backend: who has it. slurm_id: of its latest submission, None while
        that is not known. slurm_ids: of all of them.
    end: of the latest attempt, None while there is none. started_s, ended_s: seconds since the epoch.
    note: for people, about a job that has not ended: why it waits.
    """

    number: int
    folder: Path
    swept: Mapping[str, str]
    overrides: tuple[str, ...]
    content_hash: str
    num_ranks: int = 1
    device: str = "auto"
    params: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 0
    backend: str = ""
    slurm_id: str | None = None
    slurm_ids: frozenset[str] = frozenset()
    end: End | None = None
    started_s: float | None = None
    ended_s: float | None = None
    note: str = ""

    @property
    def state(self) -> str:
        if self.end is not None:
            return self.end.state
        return states.RUNNING if self.attempt else states.PENDING

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def log(self) -> Path:
        """What the job's launcher printed, rank 0's output included."""
        return self.folder / "output.log"

    @property
    def config_file(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def seconds(self) -> float | None:
        """Of the latest attempt, from its start to its end, or to now."""
        if self.started_s is None:
            return None
        return max(0.0, (self.ended_s or time.time()) - self.started_s)  # the clock may have been set back


def add(folder: Path, event: str, **facts: Any) -> None:
    """One more line in the record of the job in ``folder``, on the disk when this returns. Raises OSError."""
    append_line(folder / FILE, {"event": event, "time": time.time(), **facts})


def add_end(folder: Path, end: End) -> None:
    facts = {"state": end.state, "exit_code": end.exit_code, "rank": end.rank, "error": end.error}
    add(folder, "ended", **facts, measures=dict(end.measures))


def ended(job: Job, end: End) -> Job:
    """The job as its record would tell it after ``end``, without writing."""
    return replace(job, end=end)


def noted(job: Job, note: str) -> Job:
    return replace(job, note=note)


def read(folder: Path) -> Job | None:
    """The job of this folder; None if it was never planned to the end."""
    job: Job | None = None
    for line in read_lines(folder / FILE):
        try:
            job = _planned(folder, line) if line["event"] == "planned" else _after(job, line)
        except (KeyError, TypeError, ValueError):  # a damaged line
            continue
    return job


def reread(folder: Path) -> Job:
    """A job that was on record a moment ago. Raises FileNotFoundError: the sweep's folder was moved or deleted."""
    job = read(folder)
    if job is None:
        raise FileNotFoundError(errno.ENOENT, "a job's record is gone, was the folder moved or deleted?", str(folder))
    return job


def _planned(folder: Path, line: Mapping[str, Any]) -> Job:
    return Job(
        number=line["number"],
        folder=folder,
        swept=line["swept"],
        overrides=tuple(line["overrides"]),
        content_hash=line["content_hash"],
        num_ranks=line["num_ranks"],
        device=line["device"],
        params=line["params"],
    )


def _after(job: Job | None, line: Mapping[str, Any]) -> Job | None:
    if job is None:
        return None
    match line["event"]:
        case "claimed":
            return replace(
                job,
                attempt=line["attempt"],
                backend=line["backend"],
                slurm_id=None,
                end=None,
                started_s=None,
                ended_s=None,
            )
        case "submitted":
            return replace(job, slurm_id=line["slurm_id"], slurm_ids=job.slurm_ids | {line["slurm_id"]})
        case "started":
            return replace(job, end=None, started_s=line["time"], ended_s=None)
        case "ended":
            end = End(line["state"], line["exit_code"], line["rank"], str(line["error"]), dict(line["measures"]))
            return replace(job, end=end, ended_s=line["time"])
        case "released":
            return replace(job, end=None, attempt=0)
    return job
