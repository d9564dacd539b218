"""What a run's own plan costs it: whole commands with and without ``run.plan``, in turns.

    python benchmarks/plan_beside_a_run.py               # minutes; nothing else may run
    python benchmarks/plan_beside_a_run.py --smoke

``job`` is a tiny job of a sweep (five steps), ``run`` the default model for a hundred. Wall time is of the whole
command; a step's is the median that the summary tells.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine_bench.report import conditions, spread, write

RESULTS = Path(__file__).resolve().parent / "results"
RUNS = {"job": ["train=smoke"], "run": ["train.steps=100", "train.log_every=50", "train.eval_samples=64"]}
PLANS = ("false", "true")


def once(words: list[str], folder: Path) -> dict[str, float]:
    """wall_s of the command, step_s of its median step."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "launcher", *words, "cluster.device=cpu", f"run.dir={folder}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall_s = time.perf_counter() - began
    summary = json.loads((folder / "summary.json").read_text())
    return {"wall_s": wall_s, "step_s": summary["step_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one round of the job alone")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rounds = 1 if options.smoke else options.rounds
    facts, lines, data = conditions(), [], {}
    lines += ["| what | plan | wall s | step ms | plan's wall s, paired |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as place:
        for name, words in RUNS.items():
            if options.smoke and name != "job":
                continue
            found: dict[str, list[dict[str, float]]] = {plan: [] for plan in PLANS}
            for number in range(rounds):
                for plan in PLANS if number % 2 else PLANS[::-1]:
                    folder = Path(place) / f"{name}-{plan}-{number}"
                    found[plan].append(once([*words, f"run.plan={plan}"], folder))
            for plan in PLANS:
                walls, steps = ([one[key] for one in found[plan]] for key in ("wall_s", "step_s"))
                more = ""
                if plan == "true":
                    pairs = zip(found["true"], found["false"], strict=True)
                    more = str(spread([one["wall_s"] - other["wall_s"] for one, other in pairs]))
                row = f"| {name} | {plan} | {spread(walls)} | {1e3 * statistics.median(steps):.1f} | {more} |"
                lines.append(row)
                print(row, flush=True)
            data[name] = found
    stem = "plan-beside-a-run" + ("-smoke" if options.smoke else "")
    print("written:", *[path.name for path in write(options.out, stem, facts, "\n".join(lines), data)])


if __name__ == "__main__":
    main()
