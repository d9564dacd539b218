"""Calibrates this machine, trains with the profile, and tells how far the plans were off.

    python benchmarks/calibrate.py               # minutes; nothing else may run
    python benchmarks/calibrate.py --smoke

For each number of ranks a profile of its own, from the words that are trained with; then runs of the same words, whose
summaries compare their median step with their plans. ``held out`` runs use the profile of the first words: what it says
of another batch, other units, another wire.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from engine_bench.report import conditions, spread, write

RESULTS = Path(__file__).resolve().parent / "results"
TRAIN = ["train.steps=60", "train.log_every=30", "train.eval_samples=0", "cluster.device=cpu"]
CASES = {
    "calibrated with these words": [],
    "held out: twice the batch": ["train.global_batch=16"],
    "held out: two micro-batches": ["train.micro_batch={half}"],
    "held out: recomputation": ["train.activation_checkpointing=true"],
    "held out: wire gloo_p2p": ["sharding.wire=gloo_p2p"],
    "held out: eight layers": ["model.num_layers=8"],
}


def launch(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "launcher", *words], check=True, stdout=subprocess.DEVNULL)


def compared(folder: Path) -> dict[str, float]:
    row = json.loads((folder / "summary.json").read_text())["plan"]["compared"]["step_s"]
    return {"predicted": row["predicted"], "measured": row["measured"], "ratio": row["ratio"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two ranks, the first case, one round")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rounds = 1 if options.smoke else options.rounds
    facts, data = conditions(), {}
    lines = ["| W | run | planned ms | measured ms | measured / planned |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as place:
        for world in [2] if options.smoke else options.ranks:
            ranks = f"cluster.nproc_per_node={world}"
            found: dict[str, list[dict[str, float]]] = {}
            profiles = []
            for number in range(rounds):
                mine = Path(place) / f"profile-{world}-{number}"
                quick = ["calibrate.seconds=2"] if options.smoke else []
                launch("action=calibrate", ranks, "cluster.device=cpu", f"calibrate.dir={mine}", *quick)
                profiles.append((mine / "hardware" / "measured.yaml").read_text().replace(place, "..."))
                for name, words in list(CASES.items())[: 1 if options.smoke else None]:
                    words = [word.format(half=8 // world // 2) for word in words]
                    folder = (
                        Path(place) / f"run-{world}-{number}-{len(found)}-{name.replace(' ', '_').replace(':', '')}"
                    )
                    launch("--config-dir", str(mine), "hardware=measured", ranks, *TRAIN, *words, f"run.dir={folder}")
                    found.setdefault(name, []).append(compared(folder))
            for name, rows in found.items():
                planned, measured, ratio = (spread([row[key] for row in rows]) for key in rows[0])
                line = f"| {world} | {name} | {1e3 * planned.median:.1f} | {1e3 * measured.median:.1f} | {ratio} |"
                lines.append(line)
                print(line, flush=True)
            data[str(world)] = {"runs": found, "profiles": profiles}
    body = "\n".join(lines)
    for world, one in data.items():
        body += f"\n\n## A profile, {world} ranks\n\n```yaml\n{one['profiles'][0]}```"
    stem = "calibrate" + ("-smoke" if options.smoke else "")
    print("written:", *[path.name for path in write(options.out, stem, facts, body, data)])


if __name__ == "__main__":
    main()
