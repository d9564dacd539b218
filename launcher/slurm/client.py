"""SLURM's programs, called from here and nowhere else."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.announce import say

_TIMEOUT_S, _QUIET_S = 60, 10  # until it is ended; until people are told what is waited for
_DEFAULT_MAX_ARRAY = 1001
_SHOWN = 200  # characters of an answer that cannot be read
_SUBMITTED = re.compile(r"(\d+)(;\S*)?")
_JOB_LINE = re.compile(r"\s*\d+(_\S+)?\|")
_UNKNOWN_JOB = "Invalid job id"
# What describes the job or the ranks that this process belongs to: a job that it submits is another one.
_OTHERS = re.compile(
    r"(SLURM_(?!CONF$)|SLURMD_|SRUN_|PMI|PMIX_|RANK$|WORLD_SIZE$|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_"
    r"|CUDA_VISIBLE_DEVICES$|GPU_DEVICE_ORDINAL$)"
)


class SlurmError(Exception):
    """A program of SLURM is not there, or refuses; the text is its own. program: which one, ``sbatch``."""

    def __init__(self, words: str, program: str) -> None:
        super().__init__(words)
        self.program = program


class SlurmSilentError(SlurmError):
    """A program of SLURM did not answer in time; what it was asked to do may have been done."""


class UnknownSubmissionError(SlurmError):
    """Whether sbatch has submitted a job is not known. It may also come into the queue later."""


@dataclass(frozen=True)
class Queued:
    """What squeue or sacct says about one job (or element of an array).

    state: SLURM's word: PENDING, RUNNING, ... reason: why it waits, or how it ended; "" where there is none.
    time_left_s: until the time limit; None where there is none. restarts: how often SLURM has started the job again,
        counting a start that it has only decided on; None where that was not asked.
    """

    state: str
    reason: str = ""
    nodes: str = ""
    time_left_s: int | None = None
    restarts: int | None = None


def is_here() -> bool:
    return shutil.which("sbatch") is not None


def clean_environment(environ: Mapping[str, str], options: Collection[str] = ()) -> dict[str, str]:
    """``environ`` without what belongs to another job, and without defaults of sbatch that ``options`` decide.

    options: names of sbatch's options in the script; their SBATCH_ variables would win over the script.
    """
    decided = {f"SBATCH_{name.upper().replace('-', '_')}" for name in options}
    return {name: value for name, value in environ.items() if not _OTHERS.match(name) and name not in decided}


def sbatch(script: Path, environ: Mapping[str, str]) -> str:
    """Submit a script file; the job's id.

    Where sbatch names no job, the queue is asked for one with this script.

    Raises:
        UnknownSubmissionError: sbatch was ended for its silence and the queue has no such job, so far; or sbatch named
            none and the queue did not answer.
        SlurmError: with sbatch's own words, or with what it said instead of an id.
    """
    is_late = False
    try:
        answer = _call(["sbatch", "--parsable", str(script)], environ)
    except SlurmSilentError as error:
        said, is_late = str(error), True
    else:
        # a site's wrapper may add lines of its own
        ids = [found[1] for line in answer.splitlines() if (found := _SUBMITTED.fullmatch(line.strip()))]
        if ids:
            return ids[-1]
        said = f"sbatch named no job: it said {answer.strip()[:_SHOWN]!r}"
    try:
        ids = [job.partition("_")[0] for job, path in scripts().items() if path == script]
    except SlurmError as error:
        words = f"{said}. Whether a job of {script} is in the queue could not be asked: {error}"
        raise UnknownSubmissionError(words, "sbatch") from None
    if ids:
        return ids[-1]
    words = f"{said}; squeue knows no job of {script}"
    raise UnknownSubmissionError(f"{words}, so far", "sbatch") if is_late else SlurmError(words, "sbatch")


def queue(ids: Collection[str]) -> dict[str, Queued]:
    """Jobs that SLURM remembers, by id; elements of arrays one by one (``12_3``). It forgets some time after the end.

    ids: of jobs or elements; asking for a whole array answers for each element.

    Raises:
        SlurmError: the controller does not answer.
    """
    if not ids:
        return {}
    words = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r|%N|%L"]
    try:
        answer = _call([*words, f"--jobs={','.join(sorted(_bases(ids)))}"])
    except SlurmError as error:
        if _UNKNOWN_JOB in str(error):
            return {}
        raise
    found = {}
    for job, state, reason, nodes, left in _rows("squeue", answer, 5):
        found[job] = Queued(state, "" if reason == "None" else reason, nodes, _seconds(left))
    return found


def closely(job: str) -> Queued | None:
    """One job (or element, ``12_3``) with its restarts; None where SLURM does not know it. Raises SlurmError."""
    found = queue([job]).get(job)
    match = re.search(r"\bRestarts=(\d+)", _call(["scontrol", "--oneliner", "show", "job", job])) if found else None
    return found if found is None or match is None else replace(found, restarts=int(match[1]))


def scripts() -> dict[str, Path]:
    """Script of every job that waits or runs, by id; elements of arrays one by one. Raises SlurmError."""
    answer = _call(["squeue", "--noheader", "--array", "--format=%i|%o"])
    return {job: Path(script) for job, script in _rows("squeue", answer, 2)}


def accounting(ids: Collection[str]) -> dict[str, Queued]:
    """The same from sacct, which never forgets; nothing where there is no accounting."""
    if not ids or shutil.which("sacct") is None:
        return {}
    words = ["sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,State,NodeList"]
    found = {}
    try:
        rows = _rows("sacct", _call([*words, f"--jobs={','.join(sorted(_bases(ids)))}"]), 3)
    except SlurmError:
        return {}
    for job, state, nodes in rows:
        found[job] = Queued(state.partition(" ")[0], "", nodes)  # "CANCELLED by 1000"
    return found


def cancel(ids: Collection[str]) -> None:
    """Jobs that are gone already are no error."""
    if ids:
        try:
            _call(["scancel", *sorted(ids)])
        except SlurmError as error:
            if _UNKNOWN_JOB not in str(error):
                raise


def requeue(job: str) -> None:
    _call(["scontrol", "requeue", job])


def max_array_size() -> int:
    """Elements of one array that this cluster allows."""
    try:
        answer = _call(["scontrol", "show", "config"])
    except SlurmError:
        return _DEFAULT_MAX_ARRAY
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", answer, re.MULTILINE)
    return int(match[1]) if match else _DEFAULT_MAX_ARRAY


def _rows(program: str, answer: str, num_fields: int) -> list[list[str]]:
    """Lines of ``num_fields`` fields that begin with a job's id; other lines are a site's own words.

    Raises:
        SlurmError: there are lines, and none is a job's.
    """
    lines = [line for line in answer.splitlines() if line.strip()]
    rows = [line.split("|", num_fields - 1) for line in lines if _JOB_LINE.match(line)]
    rows = [row for row in rows if len(row) == num_fields]
    if lines and not rows:
        raise SlurmError(f"{program} said nothing that could be read: {answer.strip()[:_SHOWN]!r}", program)
    return rows


def _bases(ids: Collection[str]) -> set[str]:
    return {job.partition("_")[0] for job in ids}


def _call(words: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """Standard output of the program, which is ended with all that it started (a site's wrapper) if it stays silent."""
    program = words[0]
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=dict(clean_environment(os.environ) if environ is None else environ),
            start_new_session=True,
        )
    except FileNotFoundError:
        raise SlurmError(f"{program} is not installed here", program) from None
    with process:
        try:
            out, err = _answer(process, program)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise SlurmError(err.strip() or f"{program} ended with code {process.returncode}", program)
    return out


def _answer(process: subprocess.Popen[str], program: str) -> tuple[str, str]:
    try:
        return process.communicate(timeout=_QUIET_S)
    except subprocess.TimeoutExpired:
        say(f"{program} has not answered for {_QUIET_S} s; waiting for it, {_TIMEOUT_S} s in all")
    try:
        return process.communicate(timeout=_TIMEOUT_S - _QUIET_S)
    except subprocess.TimeoutExpired:
        raise SlurmSilentError(f"{program} did not answer in {_TIMEOUT_S} s", program) from None


def _seconds(left: str) -> int | None:
    """``1-02:03:04``, ``3:04``; None for UNLIMITED, INVALID, NOT_SET."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", left)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
