"""Damaged, foreign and malicious checkpoints: named, and nothing is touched."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.checkpoint.checksum import checksum
from recipes.checkpoint.errors import CheckpointError, DamagedCheckpoint
from recipes.checkpoint.folder import COMPLETE, MANIFEST, complete_checkpoints, marker_text, newest_complete
from recipes.checkpoint.reader import CheckpointReader
from tests.recipes.checkpoint.trainees import checkpointer, differences, everything, run_state, train, trainee
from tests.support.ranks import Pools, Rank

FILE = "rank_00000.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ``checkpoints`` folder with steps 1 and 2."""
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    work = trainee(None, "adamw", 1)
    saver = checkpointer(root, work, asynchronous=False)
    for step in (1, 2):
        train(None, work, step, 1)
        saver.save(run_state(None, step))
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def truncate(folder: Path) -> None:
    os.truncate(folder / FILE, 1000)


def flip(folder: Path) -> None:
    content = bytearray((folder / FILE).read_bytes())
    content[-5] ^= 4
    (folder / FILE).write_bytes(content)


def change_manifest(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(path.read_text().replace('"step":2', '"step":3'))


def become_a_folder(folder: Path) -> None:
    (folder / FILE).unlink()
    (folder / FILE).mkdir()


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("?")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (truncate, r"rank_00000.safetensors: 1,000 bytes, .* were written; the file was cut"),
    "flipped": (flip, r"rank_00000.safetensors: its checksum is crc32:\w+, crc32:\w+ was written"),
    "no marker": (lambda folder: (folder / COMPLETE).unlink(), "COMPLETE is missing"),
    "no shard": (lambda folder: (folder / FILE).unlink(), "rank_00000.safetensors: missing"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "manifest.json is missing"),
    "other manifest": (change_manifest, "manifest.json: .* the file was changed or cut"),
    "empty marker": (lambda folder: (folder / COMPLETE).write_text(""), "COMPLETE: not what a save leaves"),
    "unreadable file": (become_a_folder, "rank_00000.safetensors: "),
    "unreadable folder": (become_a_file, "step_00000002: cannot be read: Not a directory"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_nothing_is_touched_and_the_one_before_is_whole(root: Path, damage: str) -> None:
    do, words = DAMAGE[damage]
    last = root / "step_00000002"
    do(last)
    work = trainee(None, "adamw", 1)
    before = everything(work)
    loader = checkpointer(root, work)
    with pytest.raises(DamagedCheckpoint, match=words):
        loader.load(last)
    assert differences(everything(work), before) == []
    if damage in ("no marker", "no manifest", "other manifest", "empty marker", "unreadable folder"):
        assert [one.step for one in complete_checkpoints(root)] == [1]
    assert loader.load(root / "step_00000001").step == 1


def test_a_checkpoint_of_another_model_or_optimizer(root: Path) -> None:
    last = newest_complete(root)
    assert last is not None
    for kind, words in (("muon", "this model needs, and the checkpoint has not: a.weight"), ("sgd", "optimizer 0 is")):
        work = trainee(None, kind, 1)
        before = everything(work)
        with pytest.raises(CheckpointError, match=f"another model or optimizer; nothing was changed.*{words}") as told:
            checkpointer(root.parent / "other", work).load(last.path)
        assert not isinstance(told.value, DamagedCheckpoint)
        assert differences(everything(work), before) == []


def test_settings_go_on_unless_the_config_changes_them(root: Path) -> None:
    work = trainee(None, "adamw", 1)
    (group,) = work.optimizer.param_groups
    group["lr"], group["eps"] = 0.5, 1e-3
    loader = checkpointer(root, work)  # built with another learning rate and eps than the saved run
    group["betas"] = (0.1, 0.2)
    loader.load(root / "step_00000002")
    assert (group["lr"], group["eps"], group["betas"]) == (0.5, 1e-3, (0.9, 0.999))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_pickle_in_the_folder_is_not_executed(root: Path, tmp_path: Path) -> None:
    """Not beside the files, and not in the place of one, with marker, manifest and checksums that fit."""
    last, trap = root / "step_00000002", tmp_path / "executed"
    poison = pickle.dumps(Evil(trap))
    for name in (FILE, "model.pt", ".metadata", "__0_0.distcp"):
        (last / name).write_bytes(poison)
    tree = json.loads((last / MANIFEST).read_bytes())
    tree["files"][FILE] = {"bytes": len(poison), "checksum": checksum(poison)}
    manifest = json.dumps(tree).encode()
    (last / MANIFEST).write_bytes(manifest)
    (last / COMPLETE).write_text(marker_text(2, manifest, None))
    work = trainee(None, "adamw", 1)
    with pytest.raises(DamagedCheckpoint, match="no safetensors file"):
        checkpointer(root, work).load(last)
    assert not trap.exists()
    pickle.loads(poison)
    assert trap.exists(), "the trap must work for the test to mean anything"


def test_the_reader_gives_any_span(root: Path) -> None:
    reader = CheckpointReader(root / "step_00000002")
    whole = reader.whole("first.weight")
    assert whole.shape == (7, 3)
    assert reader.span("first.weight", 4, 9).tolist() == whole.flatten()[4:9].tolist()
    assert reader.span("first.weight", 4, 4).numel() == 0
    assert reader.spec("optimizer/0/exp_avg/first.weight").shape == (7, 3)
    with pytest.raises(CheckpointError, match="holds no tensor 'nothing'"):
        reader.spec("nothing")


def load_damaged(rank: Rank, root: Path) -> tuple[str, list[str]]:
    work = trainee(rank, "adamw", 2)
    before = everything(work)
    try:
        checkpointer(root, work).load(root / "step_00000002")
    except DamagedCheckpoint as error:
        return str(error), differences(everything(work), before)
    return "loaded", []


def test_all_ranks_hear_of_damage_that_one_of_them_found(ranks: Pools, root: Path) -> None:
    flip(root / "step_00000002")
    (first, changed), (second, also) = ranks(2).run(load_damaged, root)
    assert first == second
    assert "its checksum is" in first
    assert changed == also == []


def test_a_checkpoint_under_another_step_is_none(root: Path) -> None:
    """It would be the newest for ever: every start would go back to it."""
    (root / "step_00000001").rename(root / "step_00000099")
    assert [one.step for one in complete_checkpoints(root)] == [2]
    with pytest.raises(DamagedCheckpoint, match="step_00000099: holds step 1, and is named as step 99.*step_00000001"):
        CheckpointReader(root / "step_00000099")


def test_a_checkpoint_that_somebody_moved_and_linked_is_let_go_of_alone(saved: Path, root: Path) -> None:
    elsewhere = root.parent / "elsewhere"
    (root / "step_00000001").rename(elsewhere)
    (root / "step_00000001").symlink_to(elsewhere)
    checkpointer(root, trainee(None, "adamw", 1), asynchronous=False).save(run_state(None, 3))
    assert sorted(path.name for path in root.iterdir()) == [".lock", "attempt.json", "step_00000002", "step_00000003"]
    assert {path.name for path in elsewhere.iterdir()} == {path.name for path in (saved / "step_00000001").iterdir()}
