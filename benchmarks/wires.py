"""How long one collective takes on each wire, and what carrying and comparing labels costs.

    python benchmarks/wires.py             # 2 and 4 ranks, 4 KB to 64 MB: a few minutes; nothing else may run
    python benchmarks/wires.py --smoke     # seconds: does everything still run?

Sizes are of the full tensor (fp32). Wires take turns at every size, so that drift of the machine meets all of them.
A row "without labels" is the same wire with the check taken out, but for ``quiesce`` on ``collectives``, which is
nothing else. ``shared_memory view`` gathers without a copy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from engine_bench.fleet import Processes
from engine_bench.report import conditions, paired_ratio, write

RESULTS = Path(__file__).resolve().parent / "results"
WIRES = (
    "collectives",
    "collectives without labels",
    "gloo_p2p",
    "gloo_p2p without labels",
    "shared_memory",
    "shared_memory without labels",
    "shared_memory view",
)
PRIMITIVES = ("all_gather", "reduce_scatter", "all_reduce", "quiesce")
LABELLED = ("collectives", "gloo_p2p", "shared_memory")

Times = dict[str, list[float]]  # "wire primitive bytes" -> seconds of the slowest rank, one entry per repeat


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    facts = conditions()
    bodies, data = [], {}
    for world_size in options.ranks:
        times = measure(world_size, options.sizes, options.rounds)
        bodies.append(table(times, world_size, options.sizes))
        data[str(world_size)] = times
        print(bodies[-1], end="\n\n", flush=True)
    stem = "wires-smoke" if options.smoke else "wires"
    print("written:", *[path.name for path in write(options.out, stem, facts, "\n\n".join(bodies), {"ranks": data})])
    return 0


def measure(world_size: int, sizes: list[int], rounds: int) -> Times:
    times: Times = {}
    fleets = {name: Processes("engine_bench.wire_worker", name, world_size, {}) for name in WIRES}
    try:
        for nbytes in sizes:
            numel = max(1, nbytes // 4 // world_size)
            for _ in range(rounds):
                for primitive in PRIMITIVES:
                    for name, fleet in fleets.items():
                        if name == "shared_memory view" and primitive != "all_gather":
                            continue
                        if primitive == "quiesce" and nbytes != sizes[0]:  # moves no data
                            continue
                        ranks = fleet.ask((primitive, numel, 3))
                        slowest = [max(repeat) for repeat in zip(*ranks, strict=True)]
                        times.setdefault(f"{name} {primitive} {nbytes}", []).extend(slowest)
    finally:
        for fleet in fleets.values():
            fleet.close()
    return times


def table(times: Times, world_size: int, sizes: list[int]) -> str:
    lines = [f"### {world_size} ranks, microseconds per call, median", ""]
    lines += ["| wire | primitive | " + " | ".join(f"{nbytes / 1024:.0f} KB" for nbytes in sizes) + " |"]
    lines += ["|---|---|" + "---|" * len(sizes)]
    for name in WIRES:
        for primitive in PRIMITIVES:
            cells = [times.get(f"{name} {primitive} {nbytes}") for nbytes in sizes]
            if any(cells):
                shown = [f"{1e6 * statistics.median(cell):.0f}" if cell else "" for cell in cells]
                lines.append(f"| {name} | {primitive} | " + " | ".join(shown) + " |")
    lines += ["", "Labels: time with over time without, median [quartiles]", ""]
    lines += ["| wire | primitive | " + " | ".join(f"{nbytes / 1024:.0f} KB" for nbytes in sizes) + " |"]
    lines += ["|---|---|" + "---|" * len(sizes)]
    for name in LABELLED:
        for primitive in PRIMITIVES[:3]:
            ratios = [
                paired_ratio(times[f"{name} {primitive} {n}"], times[f"{name} without labels {primitive} {n}"])
                for n in sizes
            ]
            lines.append(f"| {name} | {primitive} | " + " | ".join(map(str, ratios)) + " |")
    return "\n".join(lines)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two ranks, two sizes, one round")
    parser.add_argument("--ranks", type=int, nargs="*", help="numbers of ranks (2 4)")
    parser.add_argument("--sizes", type=int, nargs="*", help="bytes of the full tensor")
    parser.add_argument("--rounds", type=int, help="turns of three timings per wire, primitive and size (7)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the tables and JSON")
    options = parser.parse_args(arguments)
    full = ([2, 4], [4 << 10, 256 << 10, 4 << 20, 64 << 20], 7)
    smoke = ([2], [4 << 10, 64 << 10], 1)
    for name, value in zip(("ranks", "sizes", "rounds"), smoke if options.smoke else full, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    sys.exit(main())
