"""The record of one job: what it says after each event, and after a crash in the middle of writing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.sweep import record, states
from launcher.sweep.locks import Held, Lock, is_held
from launcher.sweep.measures import curve, measures_of
from launcher.sweep.record import End


def planned(folder: Path) -> None:
    facts = {"number": 3, "swept": {"a": "1"}, "overrides": ["a=1"], "content_hash": "x", "num_ranks": 2}
    record.add(folder, "planned", **facts, device="auto", params={})


def state(folder: Path) -> str:
    job = record.read(folder)
    assert job is not None
    return job.state


def test_a_job_is_what_its_events_say(tmp_path: Path) -> None:
    assert record.read(tmp_path) is None
    planned(tmp_path)
    assert state(tmp_path) == states.PENDING
    record.add(tmp_path, "claimed", attempt=1, backend="local")
    assert state(tmp_path) == states.RUNNING
    record.add(tmp_path, "released")
    assert state(tmp_path) == states.PENDING
    record.add(tmp_path, "claimed", attempt=1, backend="local")
    record.add(tmp_path, "started", host="h", pid=1)
    record.add_end(tmp_path, End(states.FAILED, 1, rank=2, error="it broke", measures={"train_loss": 2.5}))
    job = record.read(tmp_path)
    assert job is not None and job.end is not None
    assert (job.state, job.attempt, job.end.rank, job.end.measures) == ("failed", 1, 2, {"train_loss": 2.5})
    record.add(tmp_path, "claimed", attempt=2, backend="slurm")
    record.add(tmp_path, "submitted", slurm_id="12_3")
    job = record.read(tmp_path)
    assert job is not None
    assert (job.state, job.attempt, job.slurm_id, job.end) == (states.RUNNING, 2, "12_3", None)


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_torn_last_line_says_nothing_and_harms_nothing(tmp_path: Path, cut: int) -> None:
    planned(tmp_path)
    record.add(tmp_path, "claimed", attempt=1, backend="local")
    whole = (tmp_path / record.FILE).read_bytes()
    record.add_end(tmp_path, End(states.DONE, 0))
    torn = (tmp_path / record.FILE).read_bytes()[: len(whole) + cut]
    (tmp_path / record.FILE).write_bytes(torn)
    assert state(tmp_path) == states.RUNNING
    record.add_end(tmp_path, End(states.LOST, None))
    assert state(tmp_path) == states.LOST


DAMAGED = (
    '{"event": "ended"}',
    '{"event": "ended", "state": "done", "exit_code": 0, "rank": null, "error": "", "measures": null}',
    '{"event": "claimed"}',
    '{"event": "submitted"}',
    '{"event": ["planned"]}',
    '{"event": "planned"}',
    '{"event": "paused", "by": "a later version"}',
    '{"no": "event"}',
    "[1, 2]",
    "\0\udcff",
)


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_says_nothing_and_harms_nothing(tmp_path: Path, line: str) -> None:
    planned(tmp_path)
    record.add(tmp_path, "claimed", attempt=1, backend="local")
    with (tmp_path / record.FILE).open("ab") as file:
        file.write(line.encode(errors="surrogateescape") + b"\n")
    assert state(tmp_path) == states.RUNNING
    record.add_end(tmp_path, End(states.DONE, 0))
    assert state(tmp_path) == states.DONE


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_held(path)
    with Lock(path):
        assert is_held(path)
        with pytest.raises(Held), Lock(path, wait_s=0):
            pass
    assert not is_held(path)


def test_measures_come_from_what_a_run_leaves(tmp_path: Path) -> None:
    lines = [
        {"step": step, "loss": 4.0 - step, "step_s": 0.1 * step, "peak_rss_bytes": 100 * step} for step in (1, 2, 3)
    ]
    lines += [{"step": 2, "eval_loss": 1.5}, {"step": 3, "eval_loss": 1.75}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "loss": 0.1'  # killed while writing
    (tmp_path / "metrics.jsonl").write_text(text)
    found = measures_of(tmp_path)
    assert found["train_loss"] == 1.0
    assert found["step_s"] == 0.2
    assert found["memory_bytes"] == 300
    assert (found["eval_loss"], found["best_eval_loss"]) == (1.75, 1.5)
    (tmp_path / "summary.json").write_text(
        json.dumps({"train_loss": 0.5, "evaluation": {"loss": 1.25}, "peak_memory": {"peak_allocated_bytes": 7}})
    )
    found = measures_of(tmp_path)
    assert (found["train_loss"], found["eval_loss"], found["memory_bytes"]) == (0.5, 1.25, 7)
    assert curve(tmp_path) == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert measures_of(tmp_path / "nowhere") == {}
