"""The sweep as a table: one row a job, whatever became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from launcher.sweep import states
from launcher.sweep.folder import Sweep
from launcher.sweep.measures import HELD_OUT, LOSS, default_metric
from launcher.sweep.record import Job
from recipes.amounts import memory

# Columns in which a table for people shows its jobs; results.csv has all that was measured.
_SHOWN = (
    "step_s",
    "step_over_plan",
    "units_per_s",
    "memory_bytes",
    "plan_memory_bytes",
    "memory_over_plan",
    "sent_bytes",
)
LONGEST_ERROR = 100  # characters in a table
_FIRST = (LOSS, f"best_{LOSS}", HELD_OUT, f"best_{HELD_OUT}")


@dataclass(frozen=True)
class Results:
    """swept: keys. metric: the column jobs are compared by; is_small_good: how. jobs: by number.

    columns: everything that was measured of any job, in the order of the table.
    """

    swept: tuple[str, ...]
    metric: str
    is_small_good: bool
    jobs: tuple[Job, ...]
    columns: tuple[str, ...]

    def value(self, job: Job, column: str) -> float | None:
        return None if job.end is None else job.end.measures.get(column)

    def best(self) -> Job | None:
        """The finished job with the best metric."""
        done = [job for job in self.jobs if job.state == states.DONE and self.value(job, self.metric) is not None]
        sign = 1.0 if self.is_small_good else -1.0
        return min(done, key=lambda job: sign * float(self.value(job, self.metric) or 0.0), default=None)


def unknown_metric(results: Results) -> str:
    """A line for people if ``sweep.metric`` names no column; empty otherwise."""
    if not results.columns or results.metric in results.columns:
        return ""
    return f"no job has a column {results.metric} (sweep.metric); there are: {', '.join(results.columns)}"


def results_of(sweep: Sweep, jobs: Sequence[Job] | None = None) -> Results:
    """jobs: as they are to be shown, if not as their records tell them."""
    jobs = tuple(sweep.jobs() if jobs is None else jobs)
    found = {name for job in jobs if job.end is not None for name in job.end.measures}
    columns = [name for name in (*_FIRST, *_SHOWN) if name in found]
    columns += sorted(found - set(columns))
    metric = sweep.asked.metric or default_metric(dict.fromkeys(found))
    return Results(sweep.asked.swept, metric, sweep.asked.direction == "minimize", jobs, tuple(columns))


def rows(results: Results) -> list[list[str]]:
    """For people: header and one row a job."""
    metrics = [results.metric] if results.metric in results.columns else []
    best = f"best_{results.metric}"
    metrics += [best] if best in results.columns else []
    shown = [*metrics, *(name for name in _SHOWN if name in results.columns)]
    header = ["job", *results.swept, "state", *map(title, shown), "time", "error"]
    table = [header]
    for job in results.jobs:
        values = [results.value(job, name) for name in shown]
        table.append(
            [
                str(job.number),
                *(one_line(job.swept.get(key, "")) for key in results.swept),
                job.state,
                *("" if value is None else readable(name, value) for name, value in zip(shown, values, strict=True)),
                _time(results, job),
                error_line(job),
            ]
        )
    return table


def _time(results: Results, job: Job) -> str:
    """From start to end; of a job whose start nobody saw (on SLURM), what its run says."""
    if job.end is None:
        return ""
    seconds = results.value(job, "wall_s") if job.seconds is None else job.seconds
    return "" if seconds is None else readable("seconds_s", seconds)


def as_text(results: Results) -> str:
    table = rows(results)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def counts(jobs: Sequence[Job]) -> str:
    """``10 done, 2 failed``."""
    found = {state: sum(job.state == state for job in jobs) for state in states.ALL}
    return ", ".join(f"{number} {state}" for state, number in found.items() if number)


def one_line(text: str) -> str:
    """For a cell of a table and for a terminal: no line breaks, nothing that steers a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def error_line(job: Job) -> str:
    """What a failed job said, or why another one waits."""
    if job.end is None or not job.end.error:
        return job.note if job.end is None else ""
    rank = "" if job.end.rank is None else f"rank {job.end.rank}: "
    line = one_line(" ".join(job.end.error.split()))
    return rank + (line if len(line) <= LONGEST_ERROR else f"{line[: LONGEST_ERROR - 3]}...")


def title(column: str) -> str:
    return {
        "step_s": "ms/step",
        "units_per_s": "units/s",
        "memory_bytes": "peak memory",
        "sent_bytes": "sent by rank 0",
        "step_over_plan": "step/plan",
        "plan_memory_bytes": "planned memory",
        "memory_over_plan": "memory/plan",
    }.get(column, column.replace("_", " "))


def readable(column: str, value: float) -> str:
    """With the unit that the column's name says."""
    unit = "" if column.endswith("per_s") else column.rpartition("_")[2]
    if column == "step_s":
        return f"{value * 1e3:.4g}"
    return _UNITS.get(unit, _plain)(value)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 120 else f"{value // 60:.0f} min {value % 60:.0f} s"


def _plain(value: float) -> str:
    return f"{value:.5g}"


_UNITS: Mapping[str, Callable[[float], str]] = {"bytes": memory, "s": _seconds}
