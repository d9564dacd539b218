"""The cache: found by content, whole or not at all, safe when two runs want the same thing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from recipes.data.cache import cached_folder, prepared_folder
from recipes.data.errors import DataError
from recipes.prepare import prepare_splits
from recipes.ranks import Ranks
from recipes.report import Report
from recipes.schema import RecipeConfig
from recipes.schema.data import SyntheticClicksConfig
from recipes.schema.model import DHENConfig

BUILDER = """
import sys, time
from pathlib import Path
from recipes.data.cache import cached_folder

root, mode = Path(sys.argv[1]), sys.argv[2]

def build(folder):
    (root / f"began-{mode}").touch()
    (folder / "data.bin").write_bytes(b"first half")
    time.sleep(60 if mode == "stuck" else 0.3)
    with (root / "builds.txt").open("a") as builds:
        builds.write("built\\n")
    (folder / "data.bin").write_bytes(b"whole")

print(cached_folder(root / "cache", {"what": "test"}, build, lambda line: print(line)), flush=True)
"""


def start_builder(root: Path, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(root), mode], stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} never appeared"
        time.sleep(0.02)


def ignored(line: str) -> None:
    pass


def no_locks(*args: object) -> None:
    raise OSError("no locks on this file system")


def fill(folder: Path) -> None:
    (folder / "data.bin").write_bytes(b"whole")


def test_two_processes_build_once_and_read_the_same(tmp_path: Path) -> None:
    processes = [start_builder(tmp_path, name) for name in ("a", "b")]
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1]
    assert (Path(outputs[0][-1]) / "data.bin").read_bytes() == b"whole"
    assert (tmp_path / "builds.txt").read_text() == "built\n"


def test_a_killed_build_is_never_used_and_cleaned_up(tmp_path: Path) -> None:
    stuck = start_builder(tmp_path, "stuck")
    try:
        wait_for(tmp_path / "began-stuck")
    finally:
        os.kill(stuck.pid, signal.SIGKILL)
        stuck.communicate(timeout=60)
    assert [path.name[:10] for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [".building-"]
    folder = cached_folder(tmp_path / "cache", {"what": "test"}, fill, ignored)
    assert (folder / "data.bin").read_bytes() == b"whole"
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [folder]


def test_the_second_waits_and_says_so(tmp_path: Path) -> None:
    lines: list[str] = []
    began, may_end = threading.Event(), threading.Event()
    others_may_follow = threading.Event()

    def slow(folder: Path) -> None:
        began.set()
        assert may_end.wait(60)
        fill(folder)

    first = threading.Thread(target=cached_folder, args=(tmp_path, {"a": 1}, slow, ignored))
    first.start()
    assert began.wait(60)

    def report(line: str) -> None:
        lines.append(line)
        may_end.set()

    def never(folder: Path) -> None:
        raise AssertionError("built twice")

    cached_folder(tmp_path, {"a": 1}, never, report, in_line=others_may_follow.set)
    first.join()
    assert others_may_follow.is_set()
    assert lines == ["another process is preparing the same data; waiting for it"]


def test_without_locks_the_first_rename_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.data.cache.fcntl.flock", no_locks)

    def overtaken(folder: Path) -> None:
        fill(folder)
        cached_folder(tmp_path, {"a": 1}, fill, ignored)

    folder = cached_folder(tmp_path, {"a": 1}, overtaken, ignored)
    assert (folder / "data.bin").read_bytes() == b"whole"
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]


def test_another_key_is_another_folder(tmp_path: Path) -> None:
    assert cached_folder(tmp_path, {"a": 1}, fill, ignored) != cached_folder(tmp_path, {"a": 2}, fill, ignored)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise DataError("a.txt:3: not UTF-8")

    with pytest.raises(DataError, match=r"a\.txt:3"):
        cached_folder(tmp_path, {"a": 1}, fail, ignored)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_place_that_cannot_be_written_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="Set data.cache_dir to a folder"):
        cached_folder(tmp_path / "file" / "cache", {"a": 1}, fill, ignored)


def test_other_ranks_build_only_where_the_cache_is_not_shared(tmp_path: Path, make_request) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    order: list[str] = []

    def build(folder: Path) -> None:
        order.append("build")
        fill(folder)

    def barrier() -> None:
        order.append("barrier")

    for cache_dir, is_main in ((shared, True), (shared, False), (own, False)):
        prepared_folder(
            make_request("clicks", cache_dir=cache_dir, is_main=is_main, barrier=barrier), "group", {"a": 1}, build
        )
    assert order == ["barrier", "build", "barrier", "barrier", "build"]


def test_without_locks_the_others_wait_for_the_main_rank(
    tmp_path: Path, make_request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.data.cache.fcntl.flock", no_locks)
    order: list[str] = []

    def build(folder: Path) -> None:
        order.append("build")
        fill(folder)

    request = make_request("clicks", cache_dir=tmp_path / "cache", barrier=lambda: order.append("barrier"))
    for _ in range(2):  # built, then found
        prepared_folder(request, "group", {"a": 1}, build)
    assert order == ["build", "barrier", "barrier"]


def test_a_cache_that_cannot_be_made_is_told_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = RecipeConfig(data=SyntheticClicksConfig(cache_dir=str(tmp_path / "file")), model=DHENConfig())
    with pytest.raises(DataError, match=r"data\.cache_dir: .*file cannot be made: File exists"):
        prepare_splits(config, Ranks(0, 1, torch.device("cpu")), Report(is_main=True, is_interactive=False))
