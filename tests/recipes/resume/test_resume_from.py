"""Which checkpoint a run goes on from, and which ones a start takes back: decided from names on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.checkpoint.errors import CheckpointError
from recipes.checkpoint.folder import COMPLETE, MANIFEST, marker_text
from recipes.resume_from import candidates, in_folder, to_set_aside


def run_dir(folder: Path, *steps: int) -> Path:
    for step in steps:
        (folder / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    return folder


def steps(resume: str, folder: Path) -> list[int]:
    return [one.step for one in candidates(resume, folder)]


def test_auto_takes_the_newest_first_and_nothing_where_there_is_none(tmp_path: Path) -> None:
    assert steps("auto", tmp_path / "new") == []
    assert steps("auto", run_dir(tmp_path / "a", 5, 100, 20)) == [100, 20, 5]


def test_saves_cut_short_and_other_files_are_no_candidates(tmp_path: Path) -> None:
    run = run_dir(tmp_path, 5)
    for name in (".step_00000010.attempt_1.ab", ".removing_step_00000003", "step_7"):
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints" / "step_00000009").write_text("a file")
    assert steps("auto", run) == [5]


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step_00000020"])
def test_a_path_names_a_run_its_checkpoints_or_one_of_them(tmp_path: Path, place: str) -> None:
    other = run_dir(tmp_path / "other", 10, 20)
    found = steps(str(other / place), tmp_path / "mine")
    assert found == ([20] if place.endswith("20") else [20, 10])


def test_own_checkpoints_come_before_a_named_one(tmp_path: Path) -> None:
    """The same command again, after a stop, goes on and not back."""
    other, mine = run_dir(tmp_path / "other", 50), run_dir(tmp_path / "mine", 7)
    assert steps(str(other), mine) == [7]
    assert to_set_aside(str(other), mine) == []


@pytest.mark.parametrize("place", ["nowhere", "empty", "checkpoints/step_00000999"])
def test_a_path_without_checkpoint_is_told(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="checkpoint.resume="):
        candidates(str(tmp_path / place), tmp_path / "mine")


def test_starting_over_and_going_back_take_checkpoints_back(tmp_path: Path) -> None:
    run = run_dir(tmp_path, 5, 10, 15)
    assert to_set_aside("auto", run) == []
    assert [path.name[-2:] for path in to_set_aside("never", run)] == ["15", "10", "05"]
    named = in_folder(run / "checkpoints")[1]
    assert [path.name[-2:] for path in to_set_aside(str(named.path), run)] == ["15"]


def test_a_checkpoint_may_be_called_otherwise(tmp_path: Path) -> None:
    """A copy that somebody keeps as ``best``, and a link to one of the run's own."""
    best = tmp_path / "best"
    best.mkdir()
    manifest = b"{}"
    (best / MANIFEST).write_bytes(manifest)
    (best / COMPLETE).write_text(marker_text(30, manifest, None))
    assert steps(str(best), tmp_path / "mine") == [30]
    (best / COMPLETE).unlink()
    assert steps(str(best), tmp_path / "mine") == [0]  # the start says what is wrong with it
