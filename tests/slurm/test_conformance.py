"""The same promises on this machine and on a real SLURM: how runs end, what they say, what they leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.launchers import Launcher, Local, Slurm


@pytest.fixture(params=["local", "slurm"])
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launcher]:
    cluster = Local(tmp_path) if request.param == "local" else Slurm(tmp_path, request.getfixturevalue("slurm"))
    yield cluster
    cluster.close()


def test_a_run_reaches_its_end_and_leaves_every_artefact(launcher: Launcher) -> None:
    ended = launcher.run("good", "run.seed=5")
    assert ended.code == 0, ended.text
    names = ["config.yaml", "overrides.yaml", "command.txt", "revision.txt", "packages.txt", "environment.json"]
    for name in [*names, "metrics.jsonl", "summary.json", "loss.png", "logs/rank_0.log"]:
        assert (ended.run_dir / name).stat().st_size > 0, name
    assert (ended.run_dir / "logs" / "rank_1.log").exists()
    assert list(ended.rows()) == [1, 2, 3]
    assert "held-out perplexity" in ended.text
    assert (ended.run_dir / "logs" / "rank_0.log").read_text().count("step 3/3") == 1


@pytest.mark.parametrize(
    ("how", "says", "code"),
    [
        ("raise", "rank 1 of 2 failed: RuntimeError: this rank does not like the weather", 1),
        ("kill", "rank 1 of 2 was killed by SIGKILL", 1),
        pytest.param("leave", "rank 1 of 2 left before the run ended (exit code 0)", 1, marks=pytest.mark.full),
        pytest.param("memory", "rank 1 of 2 failed: MemoryError: no room", 6, marks=pytest.mark.full),
    ],
)
def test_a_failing_rank_fails_the_run_and_is_named(launcher: Launcher, how: str, says: str, code: int) -> None:
    ended = launcher.run("bad", f"model.how={how}", "model.at_rank=1")
    assert ended.code == code, ended.text
    assert says in ended.text
    assert ("_misbehave" in ended.text) == (how in ("raise", "memory"))  # the traceback
    if how == "raise":
        assert "does not like the weather" in (ended.run_dir / "logs" / "rank_1.log").read_text()
    assert not (ended.run_dir / "summary.json").exists()


@pytest.mark.full
def test_a_mistake_of_the_user_that_only_ranks_see_has_no_traceback(launcher: Launcher) -> None:
    (launcher.folder / "corpus" / "a.txt").write_text("short")
    ended = launcher.run("empty")
    assert ended.code == 1, ended.text
    assert "Traceback" not in ended.text
