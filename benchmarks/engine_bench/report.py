"""From timed blocks to tables, a JSON file and a picture."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from engine_bench.cases import Bar, Case, bars


@dataclass
class Measured:
    """One contestant in one case. Lists have one entry per round; times are of one step.

    step_ms: the slowest rank's clock; cpu_ms: user and system time of all threads, mean over ranks.
    peak_mb: highest sum of proportional set sizes over the ranks; idle_mb: the same before the first step.
    loopback_mb: bytes through the loopback interface per step, all ranks; sent_mb: what the engine itself counted,
    of one rank; loss: after the last step, rank 0.
    """

    step_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    idle_mb: float = 0.0
    loopback_mb: float = 0.0
    sent_mb: dict[str, float] | None = None
    loss: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f} {self.high:.3f}]"


def spread(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), low, high)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ratio of blocks of the same round: what drifts between rounds drops out."""
    return spread([mine / other for mine, other in zip(ours, theirs, strict=True)])


@dataclass(frozen=True)
class Verdict:
    """A bar and how it was met. ``against``: the best of the peers that ran."""

    bar: Bar
    against: str
    ratio: Spread

    @property
    def is_met(self) -> bool:
        return self.ratio.median <= self.bar.ratio


def verdicts(case: Case, results: Mapping[str, Measured]) -> list[Verdict]:
    """Bars whose sides both ran."""
    found = []
    for bar in bars(case):
        ours = results.get(bar.ours)
        peers = {name: results[name] for name in bar.against if name in results and not results[name].problem}
        if ours is None or ours.problem or not peers:
            continue
        if bar.quantity == "memory":
            best = min(peers, key=lambda name: peers[name].peak_mb)
            ratio = ours.peak_mb / peers[best].peak_mb
            found.append(Verdict(bar, best, Spread(ratio, ratio, ratio)))
        else:
            best = min(peers, key=lambda name: statistics.median(peers[name].step_ms))
            found.append(Verdict(bar, best, paired_ratio(ours.step_ms, peers[best].step_ms)))
    return found


def case_table(case: Case, results: Mapping[str, Measured]) -> str:
    """Markdown: a row per contestant, ratios to the floor paired by round."""
    lines = [
        f"### {case.name}",
        "",
        "| engine | step ms | over floor, paired | user+sys ms | peak PSS MB | idle PSS MB | loopback MB/step "
        "| counted MB/step, one rank | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    floor = results.get("floor")
    for name, one in results.items():
        if one.problem:
            lines.append(f"| {name} | did not run: {one.problem.strip().splitlines()[-1][:120]} | | | | | | | |")
            continue
        over = "" if floor is None or floor.problem else str(paired_ratio(one.step_ms, floor.step_ms))
        sent = "" if one.sent_mb is None else f"{sum(one.sent_mb.values()):.1f}"
        lines.append(
            f"| {name} | {statistics.median(one.step_ms):.1f} | {over} | {statistics.median(one.cpu_ms):.1f} "
            f"| {one.peak_mb:.0f} | {one.idle_mb:.0f} | {one.loopback_mb:.1f} | {sent} | {one.loss:.4f} |"
        )
    judged = verdicts(case, results)
    if judged:
        lines += ["", "| bar | best peer | ratio, median [quartiles] | at most | met |", "|---|---|---|---|---|"]
        for one in judged:
            lines.append(
                f"| {one.bar.ours} {one.bar.quantity} | {one.against} | {one.ratio} | {one.bar.ratio} "
                f"| {'yes' if one.is_met else 'NO'} |"
            )
    return "\n".join(lines)


def conditions() -> dict[str, Any]:
    """What the numbers depend on, and when they were taken."""
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision.stdout.strip(),
        "processor": processor,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads_per_rank": 1,
        "load_at_start": os.getloadavg()[0],
    }


def write(folder: Path, stem: str, facts: Mapping[str, Any], body: str, data: Mapping[str, Any]) -> list[Path]:
    """Markdown and JSON of one run, named by its date."""
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / f"{facts['date'][:10]}-{stem}"
    head = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    markdown, raw = base.with_suffix(".md"), base.with_suffix(".json")
    markdown.write_text(f"# {stem}\n\n{head}\n\n{body}\n")
    raw.write_text(json.dumps({"conditions": dict(facts), **data}, indent=1) + "\n")
    return [markdown, raw]


@dataclass(frozen=True)
class CaseResult:
    """One case as it was measured: a row per contestant, and how."""

    rows: dict[str, Measured]
    settings: dict[str, Any]

    @property
    def note(self) -> str:
        return "Measured with " + ", ".join(f"{key} {value}" for key, value in self.settings.items()) + "."


def as_data(results: Mapping[str, CaseResult]) -> dict[str, Any]:
    return {
        case: {"settings": one.settings, "rows": {name: asdict(row) for name, row in one.rows.items()}}
        for case, one in results.items()
    }


def stored_cases(folder: Path, stem: str, facts: Mapping[str, Any]) -> dict[str, CaseResult]:
    """What a run of the same day has left."""
    path = folder / f"{facts['date'][:10]}-{stem}.json"
    if not path.exists():
        return {}
    return {
        case: CaseResult({name: Measured(**row) for name, row in one["rows"].items()}, one["settings"])
        for case, one in json.loads(path.read_text())["cases"].items()
    }


def picture(path: Path, results: Mapping[str, Mapping[str, Measured]]) -> None:
    """Step time over the floor of the same round: a group of bars per case, quartiles as whiskers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for rows in results.values() for name in rows if name != "floor"))
    shown = {case: rows for case, rows in results.items() if "floor" in rows and not rows["floor"].problem}
    if not shown or not names:
        return
    colours = dict(zip(names, pyplot.colormaps["tab10"].colors, strict=False))
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.6 * len(shown), 4.2), layout="constrained")
    width = 0.8 / len(names)
    for position, rows in enumerate(shown.values()):
        for index, name in enumerate(names):
            if name not in rows or rows[name].problem:
                continue
            ratio = paired_ratio(rows[name].step_ms, rows["floor"].step_ms)
            error = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
            label = name.removeprefix("ours_") + (" (ours)" if name.startswith("ours_") else "")
            axes.bar(
                position + (index - (len(names) - 1) / 2) * width,
                ratio.median,
                width * 0.92,
                yerr=error,
                color=colours[name],
                hatch="//" if name.startswith("ours_") else None,
                edgecolor="white",
                error_kw={"linewidth": 0.8},
                label=label if position == 0 or label not in axes.get_legend_handles_labels()[1] else None,
            )
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(range(len(shown)), list(shown), rotation=20, ha="right", fontsize=8)
    axes.set_ylabel("step time / no communication")
    axes.legend(fontsize=7, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
