"""Saves that are cut short, disks that are full, attempts that live on: what a later start sees."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.checkpoint.disk import Disk
from recipes.checkpoint.errors import CheckpointError, Superseded, Unsaved
from recipes.checkpoint.folder import complete_checkpoints, newest_complete
from tests.recipes.checkpoint.trainees import checkpointer, differences, everything, run_state, train, trainee
from tests.support.ranks import Pools, Rank


class Dead(BaseException):
    """The machine is gone at this moment; nobody cleans up."""


class DyingDisk(Disk):
    """Dies at its ``at``-th operation: before it, or half-way through a file."""

    def __init__(self, at: int, half_way: bool) -> None:
        self.left, self.half_way = at, half_way

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0 and not self.half_way:
            raise Dead

    def _write_all(self, descriptor: int, chunk: Any) -> None:
        if self.left < 0 and self.half_way:
            super()._write_all(descriptor, chunk[: len(chunk) // 2])
            raise Dead
        super()._write_all(descriptor, chunk)

    def make_folder(self, path: Path) -> None:
        self._count()
        super().make_folder(path)

    def write(self, path: Path, chunks: Any) -> Any:
        self._count()
        return super().write(path, chunks)

    def sync_folder(self, path: Path) -> None:
        self._count()
        super().sync_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)


@pytest.mark.parametrize("half_way", [False, True], ids=["before an operation", "half-way through a file"])
@pytest.mark.parametrize("second", [2, 1], ids=["a new step", "the same step again"])
def test_death_at_every_point_of_a_save(tmp_path: Path, half_way: bool, second: int) -> None:
    """A later start finds the old state or the new one, whole, and clears the rest away."""
    work, later = trainee(None, "sgd", 1), trainee(None, "sgd", 1)
    seen: set[str] = set()
    for at in range(100):
        root = tmp_path / f"{at}"
        train(None, work, 0, 1)
        checkpointer(root, work, asynchronous=False, keep_last=1).save(run_state(None, 1))
        old = everything(work)
        disk = DyingDisk(10**6, half_way)
        saver = checkpointer(root, work, disk=disk, asynchronous=False, keep_last=1)
        train(None, work, 1, 1)
        disk.left = at
        try:
            saver.save(run_state(None, second))
        except Dead:
            has_died = True
        else:
            has_died = False
        loader = checkpointer(root, later, attempt=1)
        newest = newest_complete(root)
        assert newest is not None, f"died at operation {at}"
        assert loader.load(newest.path).step == newest.step
        is_new = differences(everything(later), everything(work)) == []
        assert is_new or differences(everything(later), old) == [], f"died at operation {at}"
        assert {path.name for path in root.iterdir()} - {one.path.name for one in complete_checkpoints(root)} == {
            "attempt.json",
            ".lock",
        }
        seen.add("new" if is_new else "old")
        if not has_died:
            break
    assert not has_died
    assert seen == {"old", "new"}
    assert at >= 5


class FullDisk(Disk):
    """Takes so many bytes in all; says that there is room."""

    def __init__(self, room: int) -> None:
        self.room = room

    def _write_all(self, descriptor: int, chunk: Any) -> None:
        self.room -= len(chunk)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super()._write_all(descriptor, chunk)


def fill_up(rank: Rank, root: Path, asynchronous: bool) -> list[str]:
    """Rank 1's disk fills up in the second save; the third succeeds. What this rank was told."""
    work = trainee(rank, "adamw", 2)
    disk = FullDisk(10**9)
    saver = checkpointer(root, work, disk=disk, asynchronous=asynchronous)
    told = []
    for step, room in ((1, 10**9), (2, 300 if rank.rank == 1 else 10**9), (3, 10**9)):
        train(rank, work, step, 1)
        disk.room = room
        try:
            saver.save(run_state(rank, step))
            saver.wait()
        except CheckpointError as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_full_disk_on_one_rank(ranks: Pools, tmp_path: Path, asynchronous: bool) -> None:
    (first,), (second,) = ranks(2).run(fill_up, tmp_path, asynchronous)
    assert first == second
    assert first.startswith("rank 1: ")
    assert "rank_00001.safetensors: cannot be written: No space left on device; nothing of this save is kept" in first
    assert [one.step for one in complete_checkpoints(tmp_path)] == [1, 3]
    assert not [path for path in tmp_path.iterdir() if ".attempt_" in path.name]


def test_going_on_without_the_save(tmp_path: Path) -> None:
    work, said, disk = trainee(None, "sgd", 1), list[str](), FullDisk(100)
    saver = checkpointer(tmp_path, work, disk=disk, on_error="continue", say=said.append)
    saver.save(run_state(None, 1))
    saver.wait()
    assert len(said) == 1
    assert "No space left on device" in said[0] and "training goes on" in said[0]
    disk.room = 100
    with pytest.raises(Unsaved, match="No space left"):
        saver.save(run_state(None, 2), must_succeed=True)
    disk.room = 10**9
    saver.save(run_state(None, 3), must_succeed=True)
    assert saver.last_save_s is not None
    assert [one.step for one in complete_checkpoints(tmp_path)] == [3]


def test_a_file_that_the_system_does_not_let_grow(tmp_path: Path) -> None:
    """The same through the kernel's own refusal."""
    work = trainee(None, "adamw", 1)
    saver = checkpointer(tmp_path, work, asynchronous=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"rank_00000.safetensors: cannot be written: File too large"):
            saver.save(run_state(None, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert complete_checkpoints(tmp_path) == []
    saver.save(run_state(None, 2))
    assert [one.step for one in complete_checkpoints(tmp_path)] == [2]


class HopefulDisk(Disk):
    """What was free when it was asked is taken by somebody else before it is written."""

    def free_bytes(self, folder: Path) -> int:
        return 10**12


def fill(path: Path) -> None:
    """Until the system refuses."""
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mounting.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounting.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_small_file_system_that_somebody_else_fills(small_file_system: Path) -> None:
    work, filler = trainee(None, "adamw", 1), small_file_system / "filler"
    saver = checkpointer(small_file_system, work, disk=HopefulDisk(), asynchronous=False)
    saver.save(run_state(None, 1))
    with pytest.raises(OSError, match="No space left"):
        fill(filler)
    with pytest.raises(CheckpointError, match="No space left on device"):
        saver.save(run_state(None, 2))
    assert {path.name for path in small_file_system.iterdir()} <= {"attempt.json", ".lock", "filler", "step_00000001"}
    assert [one.step for one in complete_checkpoints(small_file_system)] == [1]
    filler.unlink()
    saver.save(run_state(None, 3))
    assert [one.step for one in complete_checkpoints(small_file_system)] == [1, 3]


def test_too_little_room_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    class SmallDisk(Disk):
        def free_bytes(self, folder: Path) -> int:
            return 4096

    saver = checkpointer(tmp_path, trainee(None, "sgd", 1), disk=SmallDisk())
    with pytest.raises(CheckpointError, match=r"needs 1,\d+,\d+ bytes and 4,096 are free there; nothing was written"):
        saver.save(run_state(None, 1))
    assert {path.name for path in tmp_path.iterdir()} == {"attempt.json", ".lock"}


def test_an_earlier_attempt_cannot_complete_what_a_later_one_took_over(tmp_path: Path) -> None:
    work = trainee(None, "sgd", 1)
    old = checkpointer(tmp_path, work, attempt=1, on_error="continue")
    old.save(run_state(None, 1))
    old.wait()
    new = checkpointer(tmp_path, work, attempt=2)
    new.save(run_state(None, 2))
    new.wait()
    with pytest.raises(Superseded, match="attempt 2 of this run has taken over from attempt 1"):
        old.save(run_state(None, 3), must_succeed=True)
    with pytest.raises(Superseded):
        checkpointer(tmp_path, work, attempt=1)
    assert [one.step for one in complete_checkpoints(tmp_path)] == [1, 2]
    new.save(run_state(None, 4), must_succeed=True)
    assert [one.step for one in complete_checkpoints(tmp_path)] == [2, 4]


def test_a_save_is_of_its_own_moment_and_saves_follow_one_another(tmp_path: Path) -> None:
    work, later = trainee(None, "adamw", 1), trainee(None, "adamw", 1)
    saver = checkpointer(tmp_path, work, keep_last=9)
    truths = {}
    for step in (1, 2, 3):
        train(None, work, step, 1)
        saver.save(run_state(None, step), eval_loss=1.0 / step)
        truths[step] = everything(work)
    saver.wait()
    found = complete_checkpoints(tmp_path)
    assert [(one.step, one.eval_loss) for one in found] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    loader: Callable[[Path], Any] = checkpointer(tmp_path, later).load
    for one in found:
        state = loader(one.path)
        assert differences(everything(later), truths[one.step]) == []
        assert state.per_rank is not None
        assert differences(state.per_rank, run_state(None, 0).per_rank) == []


class KeepingDisk(Disk):
    """What lies there stays there."""

    def remove(self, path: Path) -> None:
        if path.exists():
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_save_whose_old_ones_cannot_be_removed_is_a_save(tmp_path: Path, asynchronous: bool) -> None:
    work, said = trainee(None, "sgd", 1), list[str]()
    saver = checkpointer(
        tmp_path, work, disk=KeepingDisk(), keep_last=1, asynchronous=asynchronous, on_error="stop", say=said.append
    )
    for step in (1, 2, 2):  # the same step again: the one it replaces cannot be removed either
        saver.save(run_state(None, step))
        saver.wait()
        assert saver.saved_step == step
    assert [line.partition(": ")[0] for line in said] == ["checkpoint of step 2 saved; an old one stays"] * 2
    assert "cannot be removed: Operation not permitted" in said[0]
    assert complete_checkpoints(tmp_path)[-1].step == 2
