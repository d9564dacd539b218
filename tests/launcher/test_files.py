"""Lines that are only added, texts that are replaced whole."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.failure import last_lines
from launcher.files import append_line, read_lines, write_whole


def test_a_line_that_was_cut_short_takes_no_other_along(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert read_lines(path) == []
    append_line(path, {"event": "first"})
    with path.open("a") as file:
        file.write('{"event": "cut sh')
    assert read_lines(path) == [{"event": "first"}]
    append_line(path, {"event": "last"})
    assert read_lines(path) == [{"event": "first"}, {"event": "last"}]


def test_a_text_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "attempt"
    for text in ("1\n", "2\n"):
        write_whole(path, text)
        assert path.read_text() == text
        assert [one.name for one in tmp_path.iterdir()] == ["attempt"]


def test_the_end_of_a_log_is_short_however_long_the_log_or_its_lines_are(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 10_000_000 + b"\xff\n" + b"y" * 5_000 + b"\nthe end\n")
    first, second, third = last_lines(log, 3)[-10_000:].splitlines()
    assert (len(first), second, third) == (2_000, "y" * 2_000, "the end")


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As on a disk that is full: what is written up to there is written, and no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_is_written_in_part_only_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, {"event": "first"})
    with files_of_at_most(path.stat().st_size + 5), pytest.raises(OSError, match="No space left"):
        append_line(path, {"event": "second"})
    append_line(path, {"event": "third"})
    assert read_lines(path) == [{"event": "first"}, {"event": "third"}]


def test_a_text_that_finds_no_room_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    write_whole(path, "old\n")
    with files_of_at_most(1000), pytest.raises(OSError):
        write_whole(path, "new\n" * 1000)
    assert [one.name for one in tmp_path.iterdir()] == ["results.csv"]
    assert path.read_text() == "old\n"
