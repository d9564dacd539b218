"""The engine benchmarks: their arithmetic, and that they still run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # the benchmarks are scripts beside their package
try:
    from engine_bench.cases import bars, cases, contestants
    from engine_bench.fleet import loopback_bytes, proportional_set_size
    from engine_bench.report import (
        CaseResult,
        Measured,
        as_data,
        case_table,
        paired_ratio,
        picture,
        spread,
        stored_cases,
        verdicts,
        write,
    )
finally:
    sys.path.remove(str(ROOT / "benchmarks"))


def test_ratios_are_of_the_same_round() -> None:
    """A machine that slows down for everybody changes no ratio."""
    peer = [10.0, 20.0, 40.0, 80.0]
    ratio = paired_ratio([0.5 * value for value in peer], peer)
    assert (ratio.median, ratio.low, ratio.high) == (0.5, 0.5, 0.5)


def test_a_spread_is_median_and_quartiles() -> None:
    found = spread([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)
    assert spread([7.0]).median == 7.0


def _measured(step_ms: float, peak_mb: float) -> Measured:
    return Measured(step_ms=[step_ms] * 3, cpu_ms=[step_ms] * 3, peak_mb=peak_mb)


def test_bars_compare_with_the_fastest_peer_that_ran() -> None:
    case = next(case for case in cases() if case.name == "gpt-w2-raf-fp32")
    results = {
        "floor": _measured(10, 5),
        "fsdp1": _measured(20, 30),
        "fsdp2": _measured(30, 20),
        "deepspeed": Measured(problem="ImportError: not installed"),
        "ours_shared_memory": _measured(12, 25),
        "ours_gloo_p2p": _measured(19, 20),
    }
    judged = {(one.bar.ours, one.bar.quantity, one.against): one for one in verdicts(case, results)}
    step = judged["ours_shared_memory", "step", "fsdp1"]
    assert step.ratio.median == pytest.approx(0.6)
    assert step.is_met
    assert not judged["ours_gloo_p2p", "step", "fsdp1"].is_met
    memory = judged["ours_shared_memory", "memory", "fsdp2"]
    assert memory.ratio.median == pytest.approx(1.25)
    assert not memory.is_met
    assert not judged["ours_shared_memory", "step", "floor"].is_met
    text = case_table(case, results)
    assert "did not run: ImportError: not installed" in text
    assert "| ours_shared_memory step | fsdp1 | 0.600 [0.600 0.600] | 0.85 | yes |" in text


def test_every_case_has_bars_and_contestants() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names)) == 9
    for case in cases():
        running = contestants(case)
        assert running[0] == "floor"
        for bar in bars(case):
            assert bar.ours in running
            assert set(bar.against) <= set(running)


def test_looking_at_processes_from_outside() -> None:
    import os

    assert proportional_set_size(os.getpid()) > 1 << 20
    assert proportional_set_size(2**22 - 1) == 0
    assert loopback_bytes() >= 0


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    rows = {"floor": Measured(step_ms=[1.0, 2.0]), "ddp": Measured(step_ms=[1.5, 2.5]), "x": Measured(problem="no")}
    picture(tmp_path / "picture.png", {"case": rows})
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_what_was_measured_on_the_same_day_is_kept(tmp_path: Path) -> None:
    facts = {"date": "2026-01-02T03:04:05+00:00"}
    first = {"a": CaseResult({"floor": Measured([1.0], [2.0], loss=3.0)}, {"rounds": 1})}
    write(tmp_path, "engines", facts, "", {"cases": as_data(first)})
    assert stored_cases(tmp_path, "engines", {"date": "2026-01-02T09:00:00+00:00"}) == first
    assert stored_cases(tmp_path, "engines", {"date": "2026-01-03T09:00:00+00:00"}) == {}


def _run(script: str, out: Path, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--smoke", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=out)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_engines_smoke(tmp_path: Path) -> None:
    text = _run("engines.py", tmp_path, "--cases", "gpt-w2-raf-fp32", "--engines", "floor", "ours_shared_memory")
    assert "did not run" not in text
    (raw,) = tmp_path.glob("*.json")
    rows = json.loads(raw.read_text())["cases"]["gpt-w2-raf-fp32"]["rows"]
    ours = rows["ours_shared_memory"]
    assert len(ours["step_ms"]) == len(rows["floor"]["step_ms"]) == 2
    assert ours["sent_mb"]["all_gather"] > 0
    assert ours["sent_mb"]["reduce_scatter"] > 0
    assert ours["peak_mb"] > 0
    assert len(list(tmp_path.iterdir())) == 3  # table, data, picture


@pytest.mark.full
def test_engines_smoke_of_all_cases(tmp_path: Path) -> None:
    """Equal losses say that all contestants do the same work."""
    _run("engines.py", tmp_path)
    (raw,) = tmp_path.glob("*.json")
    for case, measured in json.loads(raw.read_text())["cases"].items():
        ran = {name: row for name, row in measured["rows"].items() if not row["problem"]}
        assert {"floor", "ddp", "fsdp1", "ours_shared_memory", "ours_gloo_p2p", "ours_collectives"} <= set(ran), case
        losses = [row["loss"] for name, row in ran.items() if name != "floor"]
        assert max(losses) - min(losses) < 2e-2, (case, losses)


@pytest.mark.full
def test_host_overhead_smoke(tmp_path: Path) -> None:
    text = _run("host_overhead.py", tmp_path)
    assert "| ours / fsdp1, forward+backward |" in text
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.full
def test_wires_smoke(tmp_path: Path) -> None:
    text = _run("wires.py", tmp_path)
    assert "| shared_memory view | all_gather |" in text
    assert len(list(tmp_path.iterdir())) == 2
