"""``experiment=paper/figX`` as a user types it: words of the runs, table, files, page, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import cli
from launcher.planning.figure import run_words
from launcher.schema import FIGURES
from tests.launcher.conftest import Said
from tests.support.browser import rendered

Figure = Callable[..., Said]
# GPT-175B's figures with a model that is recorded in a blink: what is tested are words and files, not numbers.
TINY = ("model.num_layers=1", "model.hidden_size=64", "model.num_heads=2", "model.vocab_size=300", "data.seq_len=32")


@pytest.fixture
def figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Figure:
    """``figure("experiment=paper/fig2b")`` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Said:
        capsys.readouterr()
        code = cli.main(words)
        printed = capsys.readouterr()
        return Said(code, printed.out, printed.err, None)

    return run


def folder() -> Path:
    (found,) = Path("figures").iterdir()
    return found


def test_a_run_is_the_figures_preset_the_point_and_what_was_typed() -> None:
    point = ("cluster.num_nodes=2", "sharding=hybrid")
    typed = ("experiment=paper/fig6a", "sharding=full", "++train.clip_norm=2", "run.dir=x", "figure.name=6a")
    assert run_words("6a", point, typed) == [
        "experiment=paper/fig6a",
        "cluster.num_nodes=2",
        "sharding=full",  # typed words win
        "++train.clip_norm=2",
        "action=plan",
    ]
    other = run_words("6c", ("experiment=paper_regnet_9b",), ("experiment=paper/fig6c",))
    assert other == ["experiment=paper_regnet_9b", "action=plan"]


def test_figure_2b_is_computed_compared_and_drawn(figure: Figure, tmp_path: Path) -> None:
    said = figure("experiment=paper/fig2b")
    assert said.code == 0, said.err
    assert len(said.err.splitlines()) == 9  # progress, a line a point
    for word in ("figure 2b", "2^30", "305.68", "one constant", "held out", "picture: figures/"):
        assert word in said.out
    assert sorted(path.name for path in folder().iterdir()) == ["figure.html", "figure.json"]
    kept = json.loads((folder() / "figure.json").read_text())
    points = [point for point in kept["points"] if point["at"] != "2^30"]
    errors = sorted(abs(point["error_percent"]) for point in points)
    assert errors[len(errors) // 2] < 5
    assert errors[-1] < 11
    assert kept["summaries"][-1]["naive_worst"] > 50  # one constant for calls of all sizes is no model of them
    seen = rendered(folder() / "figure.html", tmp_path)
    assert "Figure 2b" in seen.text
    assert seen.num_colours > 10  # an empty page has two


def test_words_of_the_user_reach_every_run(figure: Figure) -> None:
    said = figure("experiment=paper/fig7b", *TINY)
    assert said.code == 0, said.err
    kept = json.loads((folder() / "figure.json").read_text())["points"]
    told = {(point["series"], point["at"]): point["predicted"] for point in kept}
    assert told["batch 1", 128] is not None
    assert told["retries, batch 2", 128] is False
    assert told["batch 2", 128] > told["batch 1", 128]  # and it is the point's own batch


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("action=figure",), ["figure.name: which figure?", "experiment=paper/fig7b"]),
        (("experiment=paper/fig9z",), ["there is no config 'experiment/paper/fig9z'"]),
        (("experiment=paper/fig7b", "sharding.factor=3"), ["F does not divide W"]),
        (("experiment=paper/fig7b", "model.num_layrs=3"), ["there is no such key", "model.num_layers"]),
        (("experiment=paper/fig7b", "hardware=unknown"), ["this profile does not know"]),
        (("-m", "experiment=paper/fig7b,paper/fig7c"), ["one run at a time"]),
    ],
    ids=["no name", "no such figure", "factor", "misspelt", "hardware", "sweep"],
)
def test_what_is_refused(figure: Figure, words: tuple[str, ...], told: list[str]) -> None:
    said = figure(*words)
    assert said.code == 2
    for word in told:
        assert word in said.err
    assert not Path("figures").exists()


def test_a_folder_of_the_users(figure: Figure) -> None:
    assert figure("experiment=paper/fig2a", "run.dir=here").code == 0
    assert figure("experiment=paper/fig2a", "run.dir=here").code == 0  # a figure may take an older one's place
    Path("notes").mkdir()
    (Path("notes") / "mine.txt").write_text("mine")
    assert "holds something else than a figure" in figure("experiment=paper/fig2a", "run.dir=notes").err


def test_figures_are_found_by_help(figure: Figure) -> None:
    listed = figure("--help", "experiment").out
    for name in FIGURES:
        assert f"paper/fig{name} " in listed
