"""Host time of the engine per unit and step, beside FSDP1 and FSDP2: many tiny units on a process group that moves
nothing, which is launch-bound GPU work in miniature.

    python benchmarks/host_overhead.py            # 100 units, 30 rounds: a minute or two; nothing else may run
    python benchmarks/host_overhead.py --smoke    # seconds: does everything still run?

Each engine lives in a process of its own as rank 0 of 8 of torch's "fake" group; the processes take turns, a block of
steps each. Overhead is an engine's time less the plain model's in the same round, over the number of units. A unit
is eight linear layers of width 8 (sixteen parameters). The sum over units is what a GPU would wait for if its
kernels were as short as the host's work.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from engine_bench.fleet import HostFleet
from engine_bench.report import Spread, conditions, spread, write

RESULTS = Path(__file__).resolve().parent / "results"
ENGINES = ("plain", "fsdp1", "fsdp2", "ours")
PHASES = ("forward+backward", "optimizer", "whole step")
BARS = {"fsdp1": 0.7, "fsdp2": 0.6}  # ours over theirs, forward and backward


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    facts = conditions()
    times = measure(options.units, options.rounds, options.steps, reshard=not options.nraf)
    body = table(times, options.units)
    print(body)
    stem = "host-overhead-smoke" if options.smoke else "host-overhead"
    data = {"units": options.units, "reshard_after_forward": not options.nraf, "seconds_per_step": times}
    print("written:", *[path.name for path in write(options.out, stem, facts, body, data)])
    return 0


def measure(num_units: int, rounds: int, steps: int, *, reshard: bool) -> dict[str, dict[str, list[float]]]:
    """Engine -> phase -> seconds per step, one entry per round."""
    times: dict[str, dict[str, list[float]]] = {name: {phase: [] for phase in PHASES} for name in ENGINES}
    fleets = {name: HostFleet(name, num_units, reshard) for name in ENGINES}
    try:
        for fleet in fleets.values():
            fleet.steps(3)
        for turn in range(rounds):
            order = list(ENGINES)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                passes_s, optimizer_s = fleets[name].steps(steps)
                for phase, value in zip(PHASES, (passes_s, optimizer_s, passes_s + optimizer_s), strict=True):
                    times[name][phase].append(value)
    finally:
        for fleet in fleets.values():
            fleet.close()
    return times


def overhead_us(times: dict[str, dict[str, list[float]]], name: str, phase: str, num_units: int) -> list[float]:
    """Microseconds per unit and step over the plain model, round by round."""
    pairs = zip(times[name][phase], times["plain"][phase], strict=True)
    return [1e6 * (engine - plain) / num_units for engine, plain in pairs]


def table(times: dict[str, dict[str, list[float]]], num_units: int) -> str:
    lines = [
        "| engine | phase | us per unit and step | overhead over plain, us, median [quartiles] |",
        "|---|---|---|---|",
    ]
    for name in ENGINES:
        for phase in PHASES:
            total = 1e6 * statistics.median(times[name][phase]) / num_units
            over = "" if name == "plain" else _show(spread(overhead_us(times, name, phase, num_units)))
            lines.append(f"| {name} | {phase} | {total:.0f} | {over} |")
    lines += ["", "| bar | ratio of overheads, median [quartiles] | at most | met |", "|---|---|---|---|"]
    ours = overhead_us(times, "ours", PHASES[0], num_units)
    for peer, limit in BARS.items():
        theirs = overhead_us(times, peer, PHASES[0], num_units)
        ratio = spread([mine / other for mine, other in zip(ours, theirs, strict=True)])
        met = "yes" if ratio.median <= limit else "NO"
        lines.append(f"| ours / {peer}, {PHASES[0]} | {ratio} | {limit} | {met} |")
    return "\n".join(lines)


def _show(value: Spread) -> str:
    return f"{value.median:.0f} [{value.low:.0f} {value.high:.0f}]"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few units, two rounds")
    parser.add_argument("--units", type=int, help="units of the model (100)")
    parser.add_argument("--rounds", type=int, help="blocks per engine (30)")
    parser.add_argument("--steps", type=int, help="steps per block (5)")
    parser.add_argument("--nraf", action="store_true", help="keep gathered parameters between forward and backward")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the table and JSON")
    options = parser.parse_args(arguments)
    for name, full, smoke in (("units", 100, 6), ("rounds", 30, 2), ("steps", 5, 1)):
        if getattr(options, name) is None:
            setattr(options, name, smoke if options.smoke else full)
    return options


if __name__ == "__main__":
    sys.exit(main())
