"""The batch script's last act, as a program, with SLURM's programs replaced: what it asks, records and requeues."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.failure import Failure
from launcher.slurm import records
from launcher.slurm.records import RankEnd

ROOT = Path(__file__).parents[2]
JOB = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "SLURM_NTASKS": "2"}
RAISED = Failure(1, "RuntimeError: rain", 1, 10.0, traceback="Traceback ...")


def after(
    folder: Path, code: int, squeue: str, *limits: str, show: str = "Restarts=0"
) -> subprocess.CompletedProcess[str]:
    """Runs it for the last element of an array, whose job id is the array's."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in {
        "squeue": f"printf '12_2|FAILED|None|n1|5:00\\n12_3|{squeue}|n1|50:00\\n'",
        "scontrol": f"case $* in *show*) echo 'JobId=12 {show}';; *) echo $* >>{folder}/asked;; esac",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    environ = {**os.environ, **JOB, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    words = ["--run-dir", str(folder), "--code", str(code), "--lead", "80", *limits]
    command = [sys.executable, "-P", "-m", "launcher.slurm.after", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)


def asked(folder: Path) -> str:
    path = folder / "asked"
    return path.read_text() if path.exists() else ""


@pytest.fixture
def started(tmp_path: Path) -> Path:
    records.add(tmp_path, "started", job="12_3", restart=0)
    return tmp_path


def test_a_saved_element_alone_goes_back_to_the_queue(started: Path) -> None:
    records.write_rank_end(started, "12_3", 0, RankEnd(0, records.SAVED))
    done = after(started, 0, "RUNNING|None", "--max-requeues", "1")
    assert done.returncode == 75, done.stderr
    assert asked(started) == "requeue 12_3\n"
    story = records.story(started)
    assert story.ended is not None
    assert (story.ended.state, story.ended.requeued, story.num_saves) == ("preempted", True, 1)


def test_a_failed_one_names_the_rank_and_stays(started: Path) -> None:
    records.write_rank_end(started, "12_3", 0, RankEnd(1, records.FAILED, RAISED))
    done = after(started, 1, "RUNNING|None", "--max-requeues", "1")
    assert done.returncode == 1
    assert "rank 1 of 2 failed: RuntimeError: rain" in done.stderr
    assert "Traceback ..." in done.stderr
    assert asked(started) == ""


def test_a_cancelled_one_is_not_revived(started: Path) -> None:
    records.write_rank_end(started, "12_3", 0, RankEnd(0, records.SAVED))
    after(started, 0, "COMPLETING|None", "--max-requeues", "1")
    assert asked(started) == ""
    story = records.story(started)
    assert story.ended is not None
    assert (story.ended.state, story.ended.requeued) == ("cancelled", False)


def test_one_that_slurm_takes_away_comes_back_by_itself(started: Path) -> None:
    after(started, 143, "COMPLETING|None", "--max-requeues", "1", show="Restarts=1")
    assert asked(started) == ""
    story = records.story(started)
    assert story.ended is not None
    assert (story.ended.state, story.ended.requeued) == ("preempted", True)
