"""report.html: what is in it, and that a browser shows it without a network."""

from __future__ import annotations

import dataclasses
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from launcher.sweep import folder, record, states
from launcher.sweep.chart import name_scale, nice_ticks, number_scale, value_scale
from launcher.sweep.record import End
from launcher.sweep.report import pareto_front, report_page
from launcher.sweep.table import results_of
from tests.sweep.conftest import Sweeping

SWEEP = ("-m", "sweep.dir=s", "optimizer.lr=1e-4,3e-4,1e-3,3e-3", "sharding=full,replicate", "run.seed=1,2")
# No profile of the user's, no network, no sandbox (tests may run as root).
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1180,2600"
)


def test_scales() -> None:
    assert nice_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(0.13, 0.31) == [0.15, 0.2, 0.25, 0.3]
    rates = number_scale([1e-5, 1e-2], "{:g}".format)
    assert rates.is_log
    assert [name for _, name in rates.ticks] == ["1e-05", "0.0001", "0.001", "0.01"]
    assert 0 < rates.place(1e-5) < 0.1 < 0.4 < rates.place(3e-4) < 0.6
    few = value_scale([1, 2, 4, 4], "{:g}".format)
    assert [value for value, _ in few.ticks] == [1, 2, 4]
    alone = number_scale([5.0], "{:g}".format)
    assert alone.place(5.0) == pytest.approx(0.5)
    memory = number_scale([300 * 2**20, 380 * 2**20], str, unit=2**20)
    assert all(value % (20 * 2**20) == 0 for value, _ in memory.ticks)
    alike = number_scale([319.1 * 2**20, 319.4 * 2**20], lambda value: f"{value / 2**20:.0f}", unit=2**20)
    assert len({text for _, text in alike.ticks}) == len(alike.ticks) > 2
    for high in (1e4, 1e12, 1e30):  # a run that diverged to a number
        assert 3 < len(number_scale([2.0, high], "{:g}".format).ticks) <= 9
    names = name_scale(["a", "b"])
    assert [names.place(0), names.place(1)] == [0.25, 0.75]


def test_the_front_is_what_nothing_beats_in_both() -> None:
    assert pareto_front([(3, 1), (1, 3), (2, 2), (2, 4), (3, 3), (1, 3)]) == [(1, 3), (2, 2), (3, 1)]
    assert pareto_front([]) == []


def browser() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium here (Debian: chromium)")
    return found


def test_a_browser_shows_the_report(sweeping: Sweeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAIL", "3,7")
    monkeypatch.setenv("FAKE_OOM", "9")
    assert sweeping.run(*SWEEP, "sweep.max_parallel=2") == 4
    page = sweeping.folder / "s" / "report.html"
    text = page.read_text()
    assert not re.search(r"https?://|<script|<link|@import|url\(|<img", text)  # nothing from elsewhere
    assert "prefers-color-scheme: dark" in text
    command = [browser(), *QUIET.split(), f"--user-data-dir={tmp_path / 'profile'}"]
    picture = tmp_path / "report.png"
    done = subprocess.run(
        [*command, "--dump-dom", f"--screenshot={picture}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    dom = done.stdout
    assert dom.count("<svg") == 5  # three swept keys, time against memory, loss curves
    assert dom.count('<tr id="job-') == 16
    assert dom.count("<details") == 3
    assert len(re.findall(r'<polyline class="curve', dom)) == 16
    assert "13 done" in dom and "2 failed" in dom and "1 oom" in dom
    assert "rank 1: RuntimeError: the fake fails" in dom
    assert "Best eval loss" in dom
    assert 'href="#job-8"' in dom and 'id="job-8"' in dom
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    assert (width, height) == (1180, 2600)
    assert picture.stat().st_size > 30_000  # an empty page compresses to less


def test_what_a_job_says_is_text_and_its_first_line_is_short(sweeping: Sweeping) -> None:
    key = f"cluster.env.{'A_LONG_NAME_' * 9}END"
    assert sweeping.run("-m", "sweep.dir=s", f"{key}=1,2,3") == 0
    job = sweeping.folder / "s" / "jobs" / "0001"
    page = "</code></pre></details><script>document.title='gone'</script>"
    (job / "output.log").write_text(page)
    record.add_end(job, End(states.FAILED, 1, 2, f"ValueError: {page}\n{'w' * 5000}"))
    assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=collect") == 0
    text = (sweeping.folder / "s" / "report.html").read_text()
    assert "<script" not in text
    assert text.count("</details>") == 1
    summary = re.findall(r"<strong>(.*?)</strong></summary>", text)[0]
    assert summary.startswith("rank 2: ValueError: &lt;/code&gt;") and len(summary) < 250
    assert "w" * 5000 in text  # all of it, below
    titles = re.findall(r'<text class="title"[^>]*>(.*?)</text>', text)
    assert max(len(title) for title in titles) <= 140
    assert any(title.startswith("…") and title.endswith("_END") for title in titles)


def test_a_page_without_numbers_with_long_values_and_with_many_jobs(
    sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NAN", "0,1")
    assert sweeping.run("-m", "sweep.dir=s", f"cluster.env.A='{'x' * 300}',b") == 0
    text = (sweeping.folder / "s" / "report.html").read_text()
    assert "No job that is done has a number for its train loss." in text
    assert text.count('<td class="long">') == 1
    jobs = sorted((sweeping.folder / "s" / "jobs").iterdir())
    (jobs[0] / "output.log").write_text("\x1b[31mred\x1b[0m\n")
    record.add_end(jobs[0], End(states.FAILED, 1, 2, "\x1b]0;evil\x07" * 30))
    asked = folder.existing(sweeping.folder / "s")
    planned = record.read(jobs[0])
    assert planned is not None
    measures = {"train_loss": 2.0, "step_s": 0.01, "memory_bytes": 2.0**28}
    many = [
        record.ended(dataclasses.replace(planned, number=number), End(states.DONE, 0, measures=measures))
        for number in range(1, 300)
    ]
    page = report_page(results_of(asked, [planned, *many]), "s", ["fsdp-launch"])
    assert not [letter for letter in page if not (letter.isprintable() or letter == "\n")]
    assert "1 +298" in page and page.count('class="note"') == 1
    assert 'class="dot crowd"' in page or 'class="dot best"' in page
