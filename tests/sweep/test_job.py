"""One job's own process: how a run's end is put on record, and what it needs to start. One real job of each kind."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.errors import ConfigErrors
from launcher.failure import Failure
from launcher.supervisor import Outcome
from launcher.sweep import record, states
from launcher.sweep.job import end_of
from launcher.sweep.stored import stored_config
from tests.sweep.conftest import Sweeping

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "support" / "misbehaving_model.py"
FAILED = Failure(1, "RuntimeError: no", 1, 0.0)
HUNG = Failure(2, "stands still", 5, 0.0)
MEMORY = Failure(0, "MemoryError: no room", 6, 0.0)


@pytest.mark.parametrize(
    ("outcome", "state", "rank"),
    [
        (Outcome(0), states.DONE, None),
        (Outcome(75, stopped_by="SIGTERM"), states.PREEMPTED, None),
        (Outcome(130, stopped_by="SIGINT"), states.CANCELLED, None),
        (Outcome(143, stopped_by="the time limit of 5 s", is_time_limit=True), states.TIMEOUT, None),
        (Outcome(1, failure=FAILED), states.FAILED, 1),
        (Outcome(5, failure=HUNG), states.FAILED, 2),
        (Outcome(6, failure=MEMORY), states.OOM, 0),
    ],
)
def test_what_an_outcome_makes_of_a_job(outcome: Outcome, state: str, rank: int | None, tmp_path: Path) -> None:
    end = end_of(outcome.exit_code, outcome, tmp_path)
    assert (end.state, end.exit_code, end.rank) == (state, outcome.exit_code, rank)
    assert end.error == (outcome.failure.what if outcome.failure else end.error)


def test_a_secret_comes_from_the_environment(sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweeping.run("-m", "sweep.dir=s", "cluster.env.MY_API_KEY=hush_hush", "run.seed=1") == 0
    job = record.read(sweeping.folder / "s" / "jobs" / "0000")
    assert job is not None
    with pytest.raises(ConfigErrors, match="cluster.env.MY_API_KEY: the value of a secret variable is not stored"):
        stored_config(job, [])
    monkeypatch.setenv("MY_API_KEY", "hush_hush")
    config = stored_config(job, [])
    assert config.cluster.env == {"MY_API_KEY": "hush_hush"}
    assert config.run.dir == str(job.run_dir)


def launch(folder: Path, *words: str) -> tuple[int, str]:
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    (corpus / "a.txt").write_text("".join(f"the {n}th line of a small corpus\n" for n in range(400)))
    shared = [f"plugins=[{PLUGIN}]", "model=misbehaving", "data=text_files", f"data.path={corpus}", "train=smoke"]
    shared += ["train.steps=3", "cluster.device=cpu", *words]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "-m", *shared],
        cwd=folder,
        env={**environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_real_jobs_are_runs_of_their_own(tmp_path: Path) -> None:
    words = ("sweep.dir=s", "model.how=train,raise", "model.at_rank=1", f"data.cache_dir={tmp_path}/cache")
    code, text = launch(tmp_path, *words, "cluster.nproc_per_node=2")
    assert code == 4, text
    good, bad = table(tmp_path / "s")
    assert (good["state"], bad["state"], bad["failed_rank"]) == ("done", "failed", "1")
    assert bad["error"] == "RuntimeError: this rank does not like the weather"
    assert float(good["eval_loss"]) > 0 and float(good["memory_bytes"]) > 50 * 2**20
    assert float(good["sent_bytes"]) > 3 * 4 * float(good["num_parameters"]) / 2  # three steps gather half each
    run_dir = Path(good["run_dir"])
    assert (run_dir / "summary.json").exists() and (run_dir / "config.yaml").exists()
    assert (run_dir / "logs" / "rank_1.log").exists()
    assert "_misbehave" in (Path(bad["run_dir"]).parent / "output.log").read_text()  # the traceback


@pytest.mark.full
def test_peak_memory_does_not_depend_on_the_order_of_jobs(tmp_path: Path) -> None:
    """Each order begins without the data's cache, which its first job makes."""
    found = {}
    for order in ("16,384", "384,16"):
        words = (f"sweep.dir=s{order[:2]}", f"model.hidden_size={order}", f"data.cache_dir={tmp_path}/cache{order[:2]}")
        code, text = launch(tmp_path, *words, "cluster.nproc_per_node=1")
        assert code == 0, text
        rows = table(tmp_path / f"s{order[:2]}")
        found[order] = {row["model.hidden_size"]: float(row["memory_bytes"]) for row in rows}
    small_first, large_first = found["16,384"], found["384,16"]
    assert small_first["384"] > 1.02 * small_first["16"]
    for size in ("16", "384"):
        assert small_first[size] == pytest.approx(large_first[size], rel=0.01)
