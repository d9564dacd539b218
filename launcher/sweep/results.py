"""The files a sweep leaves: results.csv, results.md, report.html, each replaced in one step."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from launcher.files import write_whole
from launcher.sweep.folder import Sweep
from launcher.sweep.record import Job
from launcher.sweep.report import report_page
from launcher.sweep.table import Results, results_of, rows


def write_results(sweep: Sweep, jobs: Sequence[Job] | None = None) -> Results:
    """All three files. jobs: as in ``results_of``. Raises OSError."""
    results = results_of(sweep, jobs)
    write_whole(sweep.path / "results.csv", as_csv(results))
    write_whole(sweep.path / "results.md", as_markdown(results))
    write_whole(sweep.path / "report.html", report_page(results, sweep.path.name, sweep.asked.command))
    return results


def as_csv(results: Results) -> str:
    """Numbers as they are, unknown ones empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    facts = ["state", "exit_code", "failed_rank", "error", "attempts", "slurm_id", "seconds"]
    writer.writerow(["job", *results.swept, *facts, *results.columns, "content_hash", "run_dir"])
    for job in results.jobs:
        end = job.end
        writer.writerow(
            [
                job.number,
                *(job.swept.get(key, "") for key in results.swept),
                job.state,
                "" if end is None or end.exit_code is None else end.exit_code,
                "" if end is None or end.rank is None else end.rank,
                "" if end is None else end.error,
                job.attempt,
                job.slurm_id or "",
                "" if job.seconds is None else f"{job.seconds:.3f}",
                *("" if (value := results.value(job, name)) is None else repr(value) for name in results.columns),
                job.content_hash,
                job.run_dir,
            ]
        )
    return out.getvalue()


def as_markdown(results: Results) -> str:
    header, *body = rows(results)
    lines = [header, ["---"] * len(header), *body]
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def _cell(text: str) -> str:
    """A viewer takes ``<class ...>`` for HTML and shows nothing of it."""
    return text.replace("|", "\\|").replace("<", "&lt;")
