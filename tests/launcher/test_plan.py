"""``action=plan`` as a user types it: the table, the files, exit codes, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from launcher import cli
from launcher.check.rules.planning import KNOWN_DEVICES
from recipes.schema.derived import NEEDED_TO_PLAN
from tests.support.browser import rendered

ROOT = Path(__file__).parents[2]
SMALL = ("model=gpt_tiny", "hardware=a100_80gb", "precision=bf16", "data.seq_len=64", "model.num_layers=2")


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


Plan = Callable[..., Said]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """``plan("model=gpt_tiny", ...)`` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Said:
        capsys.readouterr()
        code = cli.main(["action=plan", *words])
        printed = capsys.readouterr()
        return Said(code, printed.out, printed.err)

    return run


def folder() -> Path:
    (found,) = Path("plans").iterdir()
    return found


def test_the_words_of_a_run_are_answered_without_one(plan: Plan) -> None:
    said = plan(*SMALL, "cluster.nproc_per_node=8", "train.global_batch=64")
    assert said.code == 0, said.err
    for word in ("F = 8, RAF", "allocated", "reserved", "margin", "optimizer", "between hosts", "tokens/s", "MFU"):
        assert word in said.out
    assert sorted(path.name for path in folder().iterdir()) == ["plan.html", "plan.json"]
    kept = json.loads((folder() / "plan.json").read_text())
    assert kept["world_size"] == 8
    assert kept["fits"] is True
    assert f"{1e3 * kept['time']['step_s']:.3g} ms" in said.out or f"{1e6 * kept['time']['step_s']:.3g} us" in said.out


def test_what_cannot_fit_ends_with_code_3_and_tells_no_speed(plan: Plan) -> None:
    said = plan(*SMALL, "hardware.usable_memory_bytes=1e6")
    assert said.code == 3
    assert "does not fit: out of memory" in said.out
    assert "train.activation_checkpointing=true" in said.out
    assert "tokens/s" not in said.out
    assert "TFLOPS" not in said.out
    kept = json.loads((folder() / "plan.json").read_text())
    assert (kept["rates"], kept["time"], kept["fits"]) == (None, None, False)
    page = (folder() / "plan.html").read_text()
    assert "Does not fit" in page
    assert "a step." not in page


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("model=gpt_tiny",), "hardware: this profile does not know"),
        ((*SMALL, "sharding.cpu_offload=true"), "sharding.cpu_offload: copies between host and device"),
        ((*SMALL, "train.compile=true"), "train.compile: which kernels a compiler would fuse"),
        ((*SMALL, "sharding.factor=3"), "sharding.factor: F does not divide W"),
    ],
    ids=["hardware", "offload", "compile", "factor"],
)
def test_what_no_plan_can_answer_is_refused(plan: Plan, words: tuple[str, ...], key: str) -> None:
    said = plan(*words)
    assert said.code == 2
    assert key in said.err
    assert not Path("plans").exists()


def test_the_remedy_for_a_key_that_was_taken_away_is_not_the_same_profile(plan: Plan) -> None:
    said = plan(*SMALL, "hardware=h200", "hardware.peak_flops_float32=null")
    assert said.code == 2
    remedy = said.err.split("remedy:")[1].splitlines()[0]
    assert "hardware.peak_flops_float32=..., another profile" in remedy
    assert "h200" not in remedy


def test_remedies_name_every_preset_with_a_data_sheet() -> None:
    presets = [yaml.safe_load(path.read_text()) for path in (ROOT / "configs/hardware").glob("*.yaml")]
    knowing = {tree["name"] for tree in presets if all(tree.get(key) is not None for key in NEEDED_TO_PLAN)}
    assert set(KNOWN_DEVICES) == knowing


def test_a_folder_of_the_users(plan: Plan) -> None:
    assert plan(*SMALL, "run.dir=here").code == 0
    assert (Path("here") / "plan.html").exists()
    assert plan(*SMALL, "run.dir=here").code == 0  # a plan may take an older one's place
    Path("notes").mkdir()
    (Path("notes") / "mine.txt").write_text("mine")
    refused = plan(*SMALL, "run.dir=notes")
    assert refused.code == 2
    assert "holds something else than a plan" in refused.err


def test_many_plans_are_one_table_and_one_picture(plan: Plan) -> None:
    said = plan("-m", *SMALL, "hardware=a100_80gb,h100_80gb", "sharding.reshard_after_forward=true,false")
    assert said.code == 0, said.err
    assert [line.split()[:3] for line in said.out.splitlines()[1:5]] == [
        ["0", "a100_80gb", "True"],
        ["1", "a100_80gb", "False"],
        ["2", "h100_80gb", "True"],
        ["3", "h100_80gb", "False"],
    ]
    kept = json.loads((folder() / "plan.json").read_text())["jobs"]
    assert [job["swept"]["hardware"] for job in kept] == ["a100_80gb", "a100_80gb", "h100_80gb", "h100_80gb"]
    assert (folder() / "plan.html").read_text().count("<svg") == 2


def test_a_search_ends_with_words_that_can_be_typed(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "cluster.nproc_per_node=2", "train.global_batch=4", "train.activation_checkpointing=true")
    assert cli.main(["action=tune", *words, "tune.max_plans=6"]) == 0
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 6  # progress, a line a plan
    (best,) = [line for line in told.out.splitlines() if line.startswith("best: ")]
    assert "why: " in told.out
    typed = best.removeprefix("best: ").split()
    assert "train.activation_checkpointing=false" in typed  # memory is plenty: nothing need be computed twice
    assert plan(*words, *typed).code == 0


class Links(HTMLParser):
    """Everything a page would fetch, and its tags that were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_page_stands_alone_and_is_drawn_by_a_browser(plan: Plan, tmp_path: Path) -> None:
    plan(*SMALL, "cluster.nproc_per_node=4", "train.global_batch=32")
    page = folder() / "plan.html"
    links = Links()
    links.feed(page.read_text())
    assert links.fetched == []
    assert links.tags.count("svg") == 2
    seen = rendered(page, tmp_path)
    for word in ("compute", "collectives", "Memory over the step", "activations", "parameters"):
        assert word in seen.text
    assert seen.num_colours > 20  # an empty page has two
