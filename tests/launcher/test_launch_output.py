"""Rank 0's output: shown as it comes, logged as lines, a progress bar working through a pseudo-terminal."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from launcher.announce import say
from launcher.log_tee import tee_output
from launcher.rank_output import Echo, LogLines
from launcher.rank_process import RankCommand
from launcher.supervisor import Limits, supervise
from tests.launcher.test_launch_supervisor import PRELUDE


@pytest.mark.parametrize(
    ("pieces", "logged"),
    [
        ([b"one\ntwo\n"], b"one\ntwo\n"),
        ([b"o", b"ne\nt", b"wo"], b"one\ntwo\n"),
        ([b"one\r\ntwo\r\n"], b"one\ntwo\n"),
        ([b"one\r", b"\ntwo\n"], b"one\ntwo\n"),
        ([b"\r 10%", b"\r 20%", b"\r100%\n"], b"100%\n"),
        ([b"\r 10%\r 20%"], b" 20%\n"),
        ([b"\x1b[31mred\x1b[0m\n"], b"red\n"),
        ([b"\n\n"], b"\n\n"),
        ([b""], b""),
    ],
    ids=["lines", "pieces", "crlf", "crlf-split", "bar", "bar-cut-off", "colours", "empty-lines", "nothing"],
)
def test_log_lines(pieces: list[bytes], logged: bytes) -> None:
    file = io.BytesIO()
    lines = LogLines(file)
    for piece in pieces:
        lines.feed(piece)
    lines.close()
    assert file.getvalue() == logged


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    file = io.BytesIO()
    lines = LogLines(file)
    for _ in range(5):
        lines.feed(b"x" * 30_000)
    assert len(file.getvalue()) > 60_000
    lines.feed(b"\nnext\n")
    assert file.getvalue() == b"x" * 150_000 + b"\nnext\n"


def _run_one(folder: Path, script: str, echo: Echo) -> None:
    command = RankCommand(
        0,
        (sys.executable, "-c", PRELUDE + script),
        {**os.environ, "RANK": "0", "PYTHONPATH": os.getcwd(), "PYTHONUNBUFFERED": "1"},
        folder / "rank_0.log",
    )
    assert supervise([command], Limits(5.0), lambda text: None, echo).exit_code == 0


def test_without_a_terminal_both_streams_are_shown_and_logged(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    echo = Echo(tmp_path / "rank_0.log", write_fd)
    assert not echo.is_terminal
    _run_one(tmp_path, "work(lambda: (print('out'), print('err', file=sys.stderr), print(sys.stdout.isatty())))", echo)
    os.close(write_fd)
    with open(read_fd, "rb") as shown:
        assert shown.read() == b"out\nerr\nFalse\n"
    assert (tmp_path / "rank_0.log").read_text() == "out\nerr\nFalse\n"


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    echo = Echo(tmp_path / "rank_0.log", write_fd)
    _run_one(tmp_path, "work(lambda: (print('a' * 100_000), print('end')))", echo)
    os.close(write_fd)
    assert (tmp_path / "rank_0.log").read_text().endswith("a\nend\n")


def test_a_log_on_a_full_disk_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", told)
    (tmp_path / "rank_0.log").symlink_to("/dev/full")
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    echo = Echo(tmp_path / "rank_0.log", write_fd)
    _run_one(tmp_path, "work(lambda: [print(n, 'a' * 1000) for n in range(200)])", echo)  # more than a pipe holds
    os.close(write_fd)
    assert told.getvalue() == "a log ends here, the run goes on: No space left on device\n"


def test_a_tee_whose_log_is_on_a_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    with tee_output(Path("/dev/full")):
        print("out")
        print("more")
    assert capsys.readouterr().out == "out\nmore\n"


def test_lines_for_nobody_are_no_error() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with os.fdopen(write_fd, "w") as stream:
        say("nobody reads this", stream)
        say("nor this", stream)


@pytest.mark.parametrize(
    ("redirection", "encoding", "says"),
    [(">&- 2>&-", "utf-8", ""), (">/dev/full", "utf-8", "No space left on device"), ("| head -c 1", "ascii", "m")],
    ids=["closed", "full", "few-letters"],
)
def test_the_program_writes_wherever_it_is_told(tmp_path: Path, redirection: str, encoding: str, says: str) -> None:
    """Never a traceback; and what is meant for people never lands in a file that happens to have descriptor 1."""
    command = f"{sys.executable} -m launcher --cfg job 'run.name=\"é\"' {redirection}"
    environ = {**os.environ, "PYTHONPATH": str(Path.cwd()), "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
    )
    assert "Traceback" not in done.stderr
    assert says in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def test_on_a_terminal_the_rank_has_one_too_of_the_same_size(tmp_path: Path) -> None:
    ours, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    echo = Echo(tmp_path / "rank_0.log", terminal)
    assert echo.is_terminal
    script = """
def work_on_a_terminal():
    sys.stderr.write("\\r 50%")
    sys.stderr.write("\\r100%\\n")
    print(sys.stdout.isatty(), os.get_terminal_size(1).columns, os.get_terminal_size(1).lines)
work(work_on_a_terminal)
"""
    _run_one(tmp_path, script, echo)
    assert os.read(ours, 1000) == b"\r 50%\r100%\r\nTrue 77 33\r\n"
    assert (tmp_path / "rank_0.log").read_text() == "100%\nTrue 77 33\n"
    os.close(ours)
    os.close(terminal)


def test_tee_keeps_the_order_of_both_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tee_output(tmp_path / "rank_3.log"):
        print("one")
        print("two", file=sys.stderr)
        print("three", end="")
    assert (tmp_path / "rank_3.log").read_text() == "one\ntwo\nthree\n"
    assert capsys.readouterr() == ("one\nthree", "two\n")
