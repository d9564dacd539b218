"""``sweep.refuse_oom``: jobs that cannot fit are found before any is started."""

from __future__ import annotations

import pytest

from tests.sweep.conftest import Sweeping

# Three memories, two learning rates each; the largest batch needs some 115 MB.
JOBS = ("-m", "sweep.dir=s", "train.global_batch=4,8,64", "optimizer.lr=1e-3,1e-4", "model.num_layers=2")
SMALL = ("hardware=a100_80gb", "hardware.usable_memory_bytes=60e6")


def test_a_sweep_with_jobs_that_cannot_fit_is_refused_as_a_whole(sweeping: Sweeping) -> None:
    assert sweeping.run(*JOBS, *SMALL, "sweep.refuse_oom=true") == 3
    assert "2 of 6 jobs do not fit by their plans (refused, nothing is started)" in sweeping.err
    told = [line for line in sweeping.err.splitlines() if line.startswith("  job ")]
    assert [line.split(":")[0].strip() for line in told] == [
        "job 4 train.global_batch=64 optimizer.lr=0.001",
        "job 5 train.global_batch=64 optimizer.lr=0.0001",
    ]
    assert "60 MB usable" in told[0]
    assert "too much; try train.activation_checkpointing=true" in told[0]
    assert not (sweeping.folder / "s").exists()
    assert sweeping.starts() == []


def test_by_default_they_are_told_and_started(sweeping: Sweeping) -> None:
    assert sweeping.run(*JOBS, *SMALL) == 0
    assert "2 of 6 jobs do not fit by their plans (started all the same" in sweeping.err
    assert len(sweeping.starts()) == 6


def test_nothing_is_planned_where_memory_is_not_known(sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not needed")

    monkeypatch.setattr("launcher.sweep.fitting.import_module", refuse)
    assert sweeping.run(*JOBS[:3], "sweep.refuse_oom=true") == 0
    assert "the memory of hardware=unknown is not known, so its jobs are not refused" in sweeping.err
    assert sweeping.run(*JOBS[:3], "sweep.refuse_oom=false", "sweep.dir=other", *SMALL) == 0
    assert "fit" not in sweeping.err


def test_a_search_passes_over_what_cannot_fit(sweeping: Sweeping) -> None:
    words = ("-m", "hydra/sweeper=optuna", "sweep.dir=s", "sweep.trials=2", "train.global_batch=4,64", "run.seed=1,2")
    assert sweeping.run(*words, "model.num_layers=2", *SMALL, "sweep.refuse_oom=true") == 0
    assert {row["train.global_batch"] for row in sweeping.rows()} == {"4"}
