"""The small versions of the paper's experiments: their arithmetic, and that each still runs and says what it should."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fsdp_core.comm.wire import DoneWork

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # the benchmarks are scripts beside their package
try:
    import paper_small
    from paper_runs import ledger, page
    from paper_runs.answer import Answer, Chart, Table, draw, median_ratio
    from paper_runs.namespaces import Sent
    from paper_runs.ranks import Ranks
    from paper_runs.slow_wire import Card, SlowWork
finally:
    sys.path.remove(str(ROOT / "benchmarks"))


def test_a_card_sends_one_message_after_the_other() -> None:
    card = Card(bytes_per_s=1e6, latency_s=0.5)
    began = time.perf_counter()
    first, second = card.book(1e6), card.book(2e6)
    assert first - began == pytest.approx(1.5, abs=0.1)
    assert second - first == pytest.approx(2.5)


def test_slow_work_is_complete_when_the_card_is_done() -> None:
    late = time.perf_counter() + 0.02
    work = SlowWork(DoneWork(), late)
    assert not work.is_completed()
    work.wait()
    assert time.perf_counter() >= late
    assert work.is_completed()


def test_headers_are_no_payload() -> None:
    sent = Sent(10_000, 10).since(Sent(1_000, 5))
    assert (sent.nbytes, sent.packets, sent.payload) == (9_000, 5, 9_000 - 5 * 66)


def test_ratios_are_of_the_same_round() -> None:
    assert median_ratio([1.0, 20.0, 3.0], [2.0, 40.0, 6.0]) == 0.5


def test_an_answer_in_words(tmp_path: Path) -> None:
    chart = Chart("c", "x", "y", {"line": [(1, 2.0), (2, 3.0)]}, log_x=True)
    text = Answer(
        "What was said.", "How.", [Table("t", ("a", "b"), [("1", "2")])], chart=chart, skipped="no root"
    ).markdown()
    assert text.splitlines() == [
        *("**The paper.** What was said.", "", "**Conditions.** How.", "", "### t", "", "| a | b |", "|---|---|"),
        *("| 1 | 2 |", "", "Not measured: no root"),
    ]
    draw(chart, tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 1000


def test_the_page_shows_the_newest_results() -> None:
    text = paper_small.PAGE.read_text()
    assert text == page.with_results(text, paper_small.RESULTS, "../benchmarks/results"), (
        "run: python benchmarks/paper_small.py --page"
    )
    for name in paper_small.EXPERIMENTS:
        assert f"<!-- {name} -->" in text


def test_a_part_of_the_page(tmp_path: Path) -> None:
    facts = {"date": "2026-01-02T00:00:00", "processor": "P", "load_at_start": 3.0}
    for day in ("2026-01-01", "2026-01-02"):
        (tmp_path / f"{day}-paper-a.json").write_text(json.dumps({"conditions": facts}))
        (tmp_path / f"{day}-paper-a.md").write_text(f"# a\n\n**Conditions.** {day}.\n\n### T\n\n| x |\n|---|\n| 1 |\n")
    found = page.with_results("Before.\n<!-- a -->\nold\n<!-- /a -->\nAfter.\n", tmp_path, "there")
    assert found.splitlines() == [
        *("Before.", "<!-- a -->"),
        "[2026-01-02](there/2026-01-02-paper-a.md), P. Other work ran beside it (load 3.0 at the start): take times"
        " with care. 2026-01-02.",
        *("", "**T**", "", "| x |", "|---|", "| 1 |", "<!-- /a -->", "After."),
    ]


def smoke(out: Path, *names: str) -> dict[str, Any]:
    """The numbers of each experiment."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "paper_small.py"),
        "--smoke",
        "--out",
        str(out),
        "--only",
        *names,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=out)
    assert done.returncode == 0, done.stderr
    found = {}
    for name in names:
        (raw,) = out.glob(f"*-paper-{name}-smoke.json")
        text = raw.with_suffix(".md").read_text()
        assert "**The paper.**" in text and "**Conditions.**" in text and "load_at_start" in text
        found[name] = json.loads(raw.read_text())["data"]
    return found


def test_smoke_on_two_ranks(tmp_path: Path) -> None:
    found = smoke(tmp_path, "units", "optimizers")
    watched = found["units"]["watched"]
    assert watched["layers"]["gathered"] < watched["1"]["gathered"] < watched["one"]["gathered"]
    apart = found["optimizers"]["difference"]
    for name in ("AdamW", "LAMB", "Adafactor"):
        assert apart[name]["float64, F = 2"] < 1e-9
    for name in ("LAMB on pieces", "torch's Adafactor on pieces"):
        assert apart[name]["float64, F = 2"] > 1e-3


@pytest.mark.full
def test_smoke_of_the_others(tmp_path: Path) -> None:
    found = smoke(tmp_path, "prefetch", "limiter", "reshard", "factor", "init", "convergence", "ledger")
    assert set(found["prefetch"]["behind a card"]["1.0"]) == {"no network", "none", "backward", "forward", "both"}
    limits = found["limiter"]["watched"]
    assert {name: one["in_flight"] for name, one in limits.items()} == {
        f"{limit}{early}": 1 if limit == "1" else 2
        for early in ("", ", forward prefetch")
        for limit in ("1", "2", "3", "4", "none")
    }
    for name in ("reshard", "factor"):
        for one in found[name].values():
            assert sum(one["watched"]["sent"].values()) == sum(one["law"][k] for k in ("gather", "reduce", "replicate"))
    curves = found["convergence"]["curves"]
    for (_, mine), (_, plain) in zip(curves["LAMB, F = 4"], curves["LAMB, unsharded"], strict=True):
        assert mine == pytest.approx(plain, abs=1e-4)


@pytest.mark.full
def test_smoke_on_two_hosts(tmp_path: Path) -> None:
    found = smoke(tmp_path, "hosts")["hosts"]["bytes"]
    for one in found.values():
        assert one["counted"] == pytest.approx(one["law"], rel=1e-6)
        assert one["law"] < one["interface"] < 1.1 * one["law"]  # labels count for more beside a tiny model
    assert found["F = 2 inside hosts, RAF"]["law"] < found["F = 2 across hosts, RAF"]["law"] / 2


@pytest.mark.full
def test_the_ledger_is_what_the_process_holds() -> None:
    """100 million parameters on two ranks: within 5 %."""
    ranks = Ranks(2)
    try:
        found = ledger.measure(ranks, ledger.HUNDRED_MILLION)
    finally:
        ranks.close()
    for name, one in found.items():
        assert one.ratio == pytest.approx(1.0, abs=0.05), name


def test_experiments_are_known_by_name() -> None:
    assert list(paper_small.EXPERIMENTS) == [
        *("prefetch", "limiter", "reshard", "factor", "units", "init", "optimizers", "convergence", "hosts", "ledger")
    ]
