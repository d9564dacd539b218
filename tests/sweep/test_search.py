"""A search by optuna: it finds, it outlives failures, it goes on from its record alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from launcher.sweep.optuna_search import Chooser
from launcher.sweep.space import Dimension, dimensions_of, with_values
from tests.support.processes import wait_until
from tests.sweep.conftest import Sweeping

SEARCH = ("-m", "hydra/sweeper=optuna", "sweep.dir=s", "optimizer.lr=tag(log, interval(1e-5, 1e-1))", "run.seed=1,2,3")


def test_overrides_become_dimensions() -> None:
    words = ["a=interval(1,2)", "b=tag(log, interval(1e-5,1e-1))", "c=int(interval(1,8))", "d=range(1,10,2)", "e=x,y"]
    overrides = OverridesParser.create().parse_overrides([*words, "f=3"])
    dimensions, problems = dimensions_of(overrides, None)
    assert problems == []
    assert dimensions == [
        Dimension("a", low=1, high=2),
        Dimension("b", low=1e-5, high=1e-1, is_log=True),
        Dimension("c", low=1, high=8, step=1, is_int=True),
        Dimension("d", low=1, high=9, step=2, is_int=True),
        Dimension("e", ("x", "y")),
    ]
    chosen = with_values(overrides, {"a": 1.5, "b": 1e-4, "c": 3, "d": 5, "e": "y"})
    assert [str(override.input_line) for override in chosen] == ["a=1.5", "b=0.0001", "c=3", "d=5", "e=y", "f=3"]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("a=interval(2,1)", "nothing between these two"),
        ("a=tag(log, interval(0,1))", "starts above 0"),
        ("a=tag(log, range(1,10,2))", "has no steps"),
        ("a=range(3,3)", "nothing between these two"),
    ],
)
def test_what_is_no_dimension(word: str, says: str) -> None:
    _, (problem,) = dimensions_of(OverridesParser.create().parse_overrides([word]), None)
    assert says in problem.what


def test_a_chooser_learns() -> None:
    """On a bowl, later choices of the estimator are nearer to its bottom than blind ones."""

    def last_half(sampler: str) -> float:
        chooser = Chooser([Dimension("x", low=-1, high=1)], sampler=sampler, seed=3, is_small_good=True)
        values = []
        for _ in range(40):
            number, params = chooser.choose()
            values.append((float(params["x"]) - 0.5) ** 2)
            chooser.tell(number, values[-1])
        return sum(values[20:])

    assert last_half("tpe") < 0.5 * last_half("random")


def test_a_search_finds_and_outlives_failures(sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAIL", "2")
    assert sweeping.run(*SEARCH, "sweep.trials=8", "sweep.max_parallel=2") == 4
    rows = sweeping.rows()
    assert [row["state"] for row in rows] == ["done", "done", "failed", *["done"] * 5]
    assert len({row["optimizer.lr"] for row in rows}) == 8
    params = json.loads((sweeping.folder / "s/jobs/0000/record.jsonl").read_text().splitlines()[0])["params"]
    assert repr(params["optimizer.lr"]) == rows[0]["optimizer.lr"]
    assert "a search of 8 jobs over 2 keys" in sweeping.out
    monkeypatch.setenv("FAKE_FAIL", "")
    assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=retry") == 0
    assert sweeping.starts().count(2) == 2
    assert len(sweeping.starts()) == 9


def test_a_killed_search_goes_on_from_its_record(sweeping: Sweeping) -> None:
    process = sweeping.start(*SEARCH, "sweep.trials=5", FAKE_S="0.3")
    wait_until(lambda: len(sweeping.starts()) == 3)
    process.kill()
    process.communicate()
    assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=resume") == 0
    assert sweeping.states() == ["done"] * 5
    starts = sweeping.starts()
    assert sorted(set(starts)) == [0, 1, 2, 3, 4]
    assert len(starts) - len(set(starts)) <= 1
    assert sweeping.run(*SEARCH, "sweep.trials=6") == 0  # the same command with more trials goes on, too
    assert len(sweeping.rows()) == 6


def test_choices_that_cannot_run_start_nothing(sweeping: Sweeping) -> None:
    words = ("-m", "hydra/sweeper=optuna", "sweep.dir=s", "cluster.nproc_per_node=4", "sharding.factor=1,2,3")
    assert sweeping.run(*words) == 2
    assert "F does not divide W = 4" in sweeping.err
    assert list(sweeping.folder.iterdir()) == []


def test_a_small_space_is_left_when_it_is_exhausted(sweeping: Sweeping) -> None:
    assert sweeping.run("-m", "hydra/sweeper=optuna", "sweep.dir=s", "run.seed=1,2", "sweep.trials=9") == 0
    assert sorted(row["run.seed"] for row in sweeping.rows()) == ["1", "2"]
    assert "the search ends" in sweeping.err


def test_a_search_without_optuna_says_what_to_install(sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.sweep.search.is_installed", lambda module: False)
    assert sweeping.run(*SEARCH) == 2
    assert "fsdp-launcher[optuna]" in sweeping.err
    assert not (Path.cwd() / "s").exists()


def test_hydras_options_of_a_sweeper_lead_to_ours(sweeping: Sweeping) -> None:
    assert sweeping.run(*SEARCH, "hydra.sweeper.n_trials=3") == 2
    assert "sweep.trials=20" in sweeping.err
    assert sweeping.run("-m", "hydra/sweeper=ax", "run.seed=1,2") == 2
    assert "there is no such sweeper here" in sweeping.err


def test_a_search_goes_on_within_narrower_limits(sweeping: Sweeping) -> None:
    """Results outside of them teach nothing, and are no error."""
    words = ("-m", "hydra/sweeper=optuna", "sweep.dir=s")
    assert sweeping.run(*words, "optimizer.lr=interval(1e-5, 1e-1)", "run.seed=1,2", "sweep.trials=4") == 0
    assert sweeping.run(*words, "optimizer.lr=interval(1e-3, 2e-3)", "run.seed=2,3", "sweep.trials=6") == 0
    assert all(1e-3 <= float(row["optimizer.lr"]) <= 2e-3 for row in sweeping.rows()[4:])


def test_a_job_that_diverged_is_a_choice_that_gave_nothing(sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NAN", "0,2")
    assert sweeping.run(*SEARCH, "sweep.trials=4") == 0
    assert [row["eval_loss"] != "" for row in sweeping.rows()] == [False, True, False, True]
    assert "the search ends" not in sweeping.err


def test_a_search_that_is_only_checked_starts_nothing(sweeping: Sweeping) -> None:
    words = ("-m", "hydra/sweeper=optuna", "sweep.dir=s", "optimizer.lr=interval(1e-5,1e-2)", "sweep.trials=7")
    assert sweeping.run(*words, "action=check") == 0
    assert "ok: a search of 7 jobs over optimizer.lr" in sweeping.out
    assert sweeping.run(*words, "action=check", "train.steps=0") == 2
    assert sweeping.run(*words, "action=plan", "hardware=a100_80gb") == 2
    assert "a search looks at results, so its jobs train" in sweeping.err
    assert list(sweeping.folder.iterdir()) == []
