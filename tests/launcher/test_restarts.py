"""Attempts: which failures are worth another one, how long to wait, how they are counted in the run folder."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from launcher import failure, restarts, run_folder
from launcher.errors import EXIT_HANG, EXIT_OUT_OF_MEMORY, EXIT_RANK_FAILED, EXIT_USAGE, ConfigErrors
from launcher.failure import Failure
from recipes.checkpoint.errors import CheckpointError, Unsaved
from recipes.checkpoint.fence import Fence
from recipes.data.errors import DataError


@pytest.mark.parametrize(
    ("end", "helps"),
    [
        (Failure(0, "RuntimeError: weather", EXIT_RANK_FAILED, 0.0), True),
        (failure.from_exit(1, -9, is_out_of_memory_kill=False), True),
        (failure.from_exit(1, 3, is_out_of_memory_kill=False), True),
        (Failure(0, "hang", EXIT_HANG, 0.0), True),
        (failure.from_exit(1, -9, is_out_of_memory_kill=True), False),
        (Failure(0, "MemoryError", EXIT_OUT_OF_MEMORY, 0.0), False),
        (failure.from_exception(0, DataError("a.txt:3: not UTF-8"), "..."), False),
        (failure.from_exception(0, OSError(errno.ENOSPC, "No space left on device"), "..."), False),
        (failure.from_exception(0, OSError(errno.EIO, "Input/output error"), "..."), True),
    ],
    ids=["raised", "killed", "left", "hang", "killed for memory", "memory", "data", "full disk", "disk error"],
)
def test_only_what_may_end_otherwise_is_tried_again(end: Failure, helps: bool) -> None:
    assert restarts.may_help(end) is helps


def test_pauses_grow_and_stay_bounded() -> None:
    assert [restarts.pause_s(number) for number in (1, 2, 3)] == [1.0, 2.0, 4.0]
    assert restarts.pause_s(10_000) == 60.0


def test_attempts_are_counted_in_the_folder(tmp_path: Path) -> None:
    assert [run_folder.next_attempt(tmp_path) for _ in range(3)] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["attempt"]


def test_a_damaged_count_is_told_and_kept(tmp_path: Path) -> None:
    (tmp_path / "attempt").write_text("many")
    with pytest.raises(ConfigErrors, match="damaged file attempt"):
        run_folder.next_attempt(tmp_path)
    assert (tmp_path / "attempt").read_text() == "many"


def test_a_log_that_goes_on_says_where_an_attempt_begins(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    run_folder.rank_log(tmp_path, 0).write_text("first\n")
    run_folder.begin_logs(tmp_path, range(2), attempt=2)
    assert run_folder.rank_log(tmp_path, 0).read_text().startswith("first\n--- attempt 2, 20")
    assert not run_folder.rank_log(tmp_path, 1).exists()  # nothing to be told apart from


def test_attempts_are_counted_on_from_what_checkpoints_know(tmp_path: Path) -> None:
    """Copied checkpoints, or a count that was removed: an attempt below theirs could save nothing."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    Fence(root, 7).claim()
    assert [run_folder.next_attempt(tmp_path) for _ in range(2)] == [8, 9]
    (root / "attempt.json").write_text("?")
    assert run_folder.next_attempt(tmp_path) == 10


def test_a_count_that_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "attempt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigErrors, match="damaged file attempt"):
        run_folder.next_attempt(tmp_path)


def test_a_run_that_cannot_save_has_failed_and_one_that_cannot_load_was_asked_wrongly() -> None:
    codes = [failure.from_exception(0, kind("disk"), "...").exit_code for kind in (Unsaved, CheckpointError)]
    assert codes == [EXIT_RANK_FAILED, EXIT_USAGE]


def test_a_full_disk_is_told_without_a_traceback() -> None:
    found = failure.from_exception(1, OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"), "Traceback")
    told = failure.describe(found, 2, Path("logs/rank_1.log"))
    assert told.startswith("No space left on device: metrics.jsonl. Make room and start the same command again")
    assert "Traceback" not in told


def test_a_folder_where_a_file_should_be_is_told_without_a_traceback() -> None:
    found = failure.from_exception(1, OSError(errno.EISDIR, "Is a directory", "r/metrics.jsonl"), "Traceback")
    assert failure.describe(found, 2, Path("logs/rank_1.log")).startswith("Is a directory: r/metrics.jsonl. Move it")
    assert not failure.from_exception(1, OSError(errno.EACCES, "Permission denied"), "Traceback").is_users
