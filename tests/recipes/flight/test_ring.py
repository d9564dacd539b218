"""The ring file: what is written is read, also by another process, after a kill, in the middle of a write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.flight import NO_FLIGHT, RingRecorder, open_recorder
from recipes.flight.recorder import EVALUATION, TRAINING
from recipes.flight.ring import CAPACITY, NEWEST, NEWEST_AT, RECORD, RECORDS_AT, create, read_ring, ring_path


def recorder(folder: Path, rank: int = 0, attempt: int = 1) -> RingRecorder:
    made = open_recorder(folder, rank=rank, world_size=4, attempt=attempt, host="here")
    assert isinstance(made, RingRecorder)
    return made


def test_events_come_back_in_order_with_step_phase_and_activity(tmp_path: Path) -> None:
    writer = recorder(tmp_path, rank=3, attempt=2)
    writer.enter(TRAINING)
    writer.step = 12
    writer.event("gather", "blocks.5", "forward")
    writer.event("await", "blocks.5", "forward")
    with writer.during(EVALUATION):
        writer.event("gather", "blocks.6", "forward")
    ring = read_ring(ring_path(tmp_path, 3))
    assert ring is not None
    assert (ring.rank, ring.world_size, ring.pid, ring.attempt, ring.host) == (3, 4, os.getpid(), 2, "here")
    rows = [(e.number, e.step, e.ordinal, e.kind, e.phase, e.activity, e.unit) for e in ring.entries]
    assert rows == [
        (1, 0, 0, "enter", "", "start-up", ""),
        (2, 0, 0, "enter", "", "training", ""),
        (3, 12, 1, "gather", "forward", "training", "blocks.5"),
        (4, 12, 0, "await", "forward", "training", "blocks.5"),
        (5, 12, 0, "enter", "", "evaluation", ""),
        (6, 12, 2, "gather", "forward", "evaluation", "blocks.6"),
        (7, 12, 0, "enter", "", "training", ""),
    ]
    assert all(before.time_s <= after.time_s for before, after in zip(ring.entries, ring.entries[1:], strict=False))


def test_only_the_last_events_are_kept(tmp_path: Path) -> None:
    writer = recorder(tmp_path)
    for step in range(3 * CAPACITY):
        writer.step = step
        writer.event("data")
    ring = read_ring(ring_path(tmp_path, 0))
    assert ring is not None
    assert len(ring.entries) == CAPACITY
    assert [entry.step for entry in ring.entries[-3:]] == [3 * CAPACITY - 3, 3 * CAPACITY - 2, 3 * CAPACITY - 1]
    assert ring_path(tmp_path, 0).stat().st_size == RECORDS_AT + CAPACITY * RECORD.size


def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    memory = create(tmp_path, rank=0, world_size=1, attempt=1, host="")
    writer = RingRecorder(memory)
    for unit in ("a", "b", "c"):
        writer.event("forward", unit)
    offset = RECORDS_AT + 2 * RECORD.size
    memory[offset : offset + 8] = (2 + CAPACITY).to_bytes(8, "little")  # the head of the next round, nothing behind it
    ring = read_ring(ring_path(tmp_path, 0))
    assert ring is not None
    assert [entry.unit for entry in ring.entries] == ["a", "c"]


def test_a_record_that_was_never_announced_is_not_read(tmp_path: Path) -> None:
    memory = create(tmp_path, rank=0, world_size=1, attempt=1, host="")
    writer = RingRecorder(memory)
    writer.event("forward", "a")
    writer.event("forward", "b")
    NEWEST.pack_into(memory, NEWEST_AT, 1)
    ring = read_ring(ring_path(tmp_path, 0))
    assert ring is not None
    assert [entry.unit for entry in ring.entries] == ["a"]


@pytest.mark.parametrize("content", [b"", b"short", b"x" * (RECORDS_AT + CAPACITY * RECORD.size)], ids=len)
def test_other_files_are_no_rings(tmp_path: Path, content: bytes) -> None:
    ring_path(tmp_path, 0).write_bytes(content)
    assert read_ring(ring_path(tmp_path, 0)) is None
    assert read_ring(ring_path(tmp_path, 1)) is None


def test_of_a_long_unit_name_the_end_is_kept(tmp_path: Path) -> None:
    recorder(tmp_path).event("gather", "a_long_name." * 20 + "blocks.117", "backward")
    ring = read_ring(ring_path(tmp_path, 0))
    assert ring is not None
    assert ring.entries[-1].unit.startswith("...")
    assert ring.entries[-1].unit.endswith(".blocks.117")


def test_a_killed_process_leaves_its_last_event(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from recipes.flight import open_recorder
writer = open_recorder(Path({str(tmp_path)!r}), rank=0, world_size=1, attempt=1, host="")
writer.event("gather", "blocks.7", "backward")
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert done.returncode == -signal.SIGKILL
    ring = read_ring(ring_path(tmp_path, 0))
    assert ring is not None
    assert (ring.entries[-1].kind, ring.entries[-1].unit) == ("gather", "blocks.7")


def test_where_no_file_can_be_made_the_run_goes_on_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "flight").write_text("a file where the folder would be")
    made = open_recorder(tmp_path / "flight", rank=0, world_size=1, attempt=1, host="")
    assert made is NO_FLIGHT
    assert "no flight recorder" in caplog.text
    made.event("gather", "blocks.0")
    with made.during(EVALUATION):
        made.enter(TRAINING)
