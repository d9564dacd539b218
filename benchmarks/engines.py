"""Step time, processor time, memory and bytes of the engine beside its peers, on one machine's CPU.

    python benchmarks/engines.py                        # all cases: about an hour on two cores; nothing else may run
    python benchmarks/engines.py --cases gpt-w2-raf-fp32 --rounds 5     # joins what was measured earlier today
    python benchmarks/engines.py --smoke                # tiny models, seconds: does everything still run?

Contestants of a case stay alive together and take turns: in each round every one runs a block of steps, in an order
that rotates, so that whatever changes on the machine meets all of them. Compared are blocks of the same round.
"No communication" (``floor``) is W plain processes that train at the same time: the time a step takes when an engine
costs nothing. Memory is taken in a pass of its own, since looking costs time. DeepSpeed is an extra
(``pip install deepspeed``); without it its rows say so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from engine_bench.cases import Case, cases, contestants
from engine_bench.fleet import ContestantFailed, Fleet, PeakMemory, loopback_bytes, proportional_set_size
from engine_bench.report import (
    CaseResult,
    Measured,
    as_data,
    case_table,
    conditions,
    picture,
    stored_cases,
    write,
)

MB = 1e6
RESULTS = Path(__file__).resolve().parent / "results"


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    size = "tiny" if options.smoke else "34m"
    chosen = [case for case in cases(size) if not options.cases or case.name in options.cases]
    if not chosen:
        print(f"no such case; there are {', '.join(case.name for case in cases(size))}", file=sys.stderr)
        return 2
    facts = conditions()
    stem = "engines-smoke" if options.smoke else "engines"
    results = stored_cases(options.out, stem, facts)
    for case in chosen:
        names = [name for name in contestants(case) if not options.engines or name in options.engines]
        settings = {"rounds": options.rounds, "steps": options.steps, "warm_up": options.warm_up}
        results[case.name] = CaseResult(measure(case, names, **settings), settings | {"started": facts["date"]})
        print(case_table(case, results[case.name].rows), end="\n\n", flush=True)
        paths = save(options.out, stem, facts, [one for one in cases(size) if one.name in results], results)
    print("written:", *[path.name for path in paths if path.exists()])
    return 0


def save(
    folder: Path, stem: str, facts: dict[str, Any], shown: list[Case], results: dict[str, CaseResult]
) -> list[Path]:
    """Tables, JSON and picture of everything measured so far, so that a run that is stopped keeps its cases."""
    tables = [case_table(case, results[case.name].rows) + f"\n\n{results[case.name].note}" for case in shown]
    written = write(folder, stem, facts, "\n\n".join(tables), {"cases": as_data(results)})
    image = written[0].with_suffix(".png")
    picture(image, {case.name: results[case.name].rows for case in shown})
    return [*written, image]


def measure(case: Case, names: list[str], *, rounds: int, steps: int, warm_up: int) -> dict[str, Measured]:
    """All contestants of one case, interleaved."""
    results = {name: Measured() for name in names}
    fleets: dict[str, Fleet] = {}
    try:
        for name in names:
            with_problem(results[name], lambda name=name: fleets.setdefault(name, Fleet(name, case)))
        for name, fleet in list(fleets.items()):
            if not with_problem(results[name], lambda fleet=fleet: warm(fleet, results[fleet.name], warm_up)):
                fleets.pop(name).close()
        for turn in range(rounds):
            order = list(fleets)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                time_block(fleets[name], results[name], steps)
        for name, fleet in fleets.items():
            watch_memory(fleet, results[name], steps)
    finally:
        for fleet in fleets.values():
            fleet.close()
    return results


def with_problem(result: Measured, action) -> bool:  # type: ignore[no-untyped-def]
    """Run ``action``; a contestant that cannot run is noted in its row and left out."""
    try:
        action()
    except ContestantFailed as error:
        result.problem = str(error)
        return False
    return True


def warm(fleet: Fleet, result: Measured, warm_up: int) -> None:
    result.idle_mb = sum(map(proportional_set_size, fleet.pids)) / MB
    fleet.steps(warm_up)


def time_block(fleet: Fleet, result: Measured, steps: int) -> None:
    sent_before, before = fleet.bytes_sent()[0], loopback_bytes()
    blocks = fleet.steps(steps)
    after, sent_after = loopback_bytes(), fleet.bytes_sent()[0]
    result.step_ms.append(1e3 * max(block.wall_s for block in blocks) / steps)
    result.cpu_ms.append(1e3 * statistics.mean(block.cpu_s for block in blocks) / steps)
    result.loopback_mb = (after - before) / steps / MB
    result.loss = blocks[0].loss
    if sent_before is not None and sent_after is not None:
        result.sent_mb = {key: (sent_after[key] - sent_before.get(key, 0)) / steps / MB for key in sent_after}


def watch_memory(fleet: Fleet, result: Measured, steps: int) -> None:
    with PeakMemory(fleet.pids) as memory:
        fleet.steps(max(steps, 2))
    result.peak_mb = max(memory.peak_bytes, sum(map(proportional_set_size, fleet.pids))) / MB


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny models, one round")
    parser.add_argument("--cases", nargs="*", default=[], help="names of cases; default: all")
    parser.add_argument("--engines", nargs="*", default=[], help="names of contestants; default: all of the case")
    parser.add_argument("--rounds", type=int, help="blocks per contestant (12)")
    parser.add_argument("--steps", type=int, help="steps per block (3)")
    parser.add_argument("--warm-up", type=int, help="untimed steps first (3)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for tables, JSON and picture")
    options = parser.parse_args(arguments)
    defaults = (2, 1, 1) if options.smoke else (12, 3, 3)
    for name, value in zip(("rounds", "steps", "warm_up"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    sys.exit(main())
