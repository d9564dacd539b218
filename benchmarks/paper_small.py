"""Small versions of the FSDP paper's experiments, on CPU: what the paper says, and what it left unmeasured.

    python benchmarks/paper_small.py                      # all: about ten minutes on two cores; nothing else may run
    python benchmarks/paper_small.py --only prefetch hosts
    python benchmarks/paper_small.py --smoke              # tiny models: does everything still run?

Each experiment leaves a table, its numbers and mostly a picture in ``benchmarks/results``, named by the day. They are
about ratios of settings on one machine, not about how fast it is. ``hosts`` needs root and says so where there is none.
docs/experiments.md tells what was found: its tables are made anew from the newest results after every full run, and
with ``--page`` without a run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine_bench.report import conditions, write
from paper_runs import (
    convergence,
    footprint,
    hosts,
    initialisation,
    ledger,
    limiter,
    optimizers,
    page,
    prefetch,
    unit_size,
)
from paper_runs.answer import Answer, draw
from paper_runs.ranks import Pool

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = RESULTS.parents[1] / "docs" / "experiments.md"
EXPERIMENTS: dict[str, Callable[[Pool, bool], Answer]] = {
    "prefetch": prefetch.run,
    "limiter": limiter.run,
    "reshard": footprint.run_reshard,
    "factor": footprint.run_factor,
    "units": unit_size.run,
    "init": initialisation.run,
    "optimizers": optimizers.run,
    "convergence": convergence.run,
    "hosts": hosts.run,
    "ledger": ledger.run,
}


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.page:
        _write_page()
        return 0
    pool, load = Pool(), os.getloadavg()[0]
    try:
        for name in options.only or EXPERIMENTS:
            print(f"## {name}\n", flush=True)
            print(_one(name, pool, options, load), end="\n\n", flush=True)
    finally:
        pool.close()
    if options.out == RESULTS and not options.smoke:
        _write_page()
    return 0


def _write_page() -> None:
    PAGE.write_text(page.with_results(PAGE.read_text(), RESULTS, "../benchmarks/results"))


def _one(name: str, pool: Pool, options: argparse.Namespace, load: float) -> str:
    """Run, save, and return what to print. load: before the first experiment; later it is the experiments' own."""
    facts, began = conditions() | {"load_at_start": load}, time.perf_counter()
    answer = EXPERIMENTS[name](pool, options.smoke)
    facts |= {"load_at_end": os.getloadavg()[0], "took_s": round(time.perf_counter() - began, 1)}
    body = answer.markdown()
    if answer.skipped:
        return body
    paths = write(
        options.out, f"paper-{name}{'-smoke' if options.smoke else ''}", facts, body, {"data": dict(answer.data)}
    )
    if answer.chart is not None:
        paths.append(paths[0].with_suffix(".png"))
        draw(answer.chart, paths[-1])
    return f"{body}\n\nwritten: {' '.join(path.name for path in paths)}, {facts['took_s']} s"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(EXPERIMENTS), help="some experiments; default: all")
    parser.add_argument("--smoke", action="store_true", help="tiny models, one round")
    parser.add_argument("--page", action="store_true", help="only write the tables of docs/experiments.md anew")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for tables, JSON and pictures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
