"""What decides the memory of the FSDP paper's GPT-175B and T5-11B (figures 8b, 8c): its runs under one habit after the
other, beside the paper.

    python benchmarks/paper_memory.py [gpt|t5] [WORDS ...]     # ten minutes

GB of one rank, 1e9 bytes. Retries are not looked at: memory has no end here. What the habits are: docs/plan.md.
"""

from __future__ import annotations

import sys
from statistics import median

from launcher.checked import checked
from launcher.compose import compose
from recipes.plan.figures.points import load
from recipes.plan.machine import machine_of
from recipes.plan.predict import predict
from recipes.plan.record import record_run
from recipes.schema import RecipeConfig

MEASURES = ("allocated", "active", "reserved")
FIGURES = {"gpt": "8b", "t5": "8c"}
RANKS_PER_HOST = 8
ACCOUNTS = {  # each with what the ones before it have, beginning with this engine
    "this engine": ("plan=default",),
    "concatenated": ("plan.gradients=concatenated",),
    "its loop": (),  # the preset's own frees_gradients and keeps_output
    "packed": ("plan.packs_state=true",),
}


def published(figure: str) -> dict[tuple[str, ...], dict[str, float]]:
    """By the words of a run, by measure."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for point in load(figure).points:
        if point.measure in MEASURES:
            found.setdefault(point.words, {})[point.measure] = float(point.published)
    return found


def main(words: list[str]) -> None:
    model = words.pop(0) if words and words[0] in FIGURES else "gpt"
    errors: dict[str, list[tuple[float, ...]]] = {}
    print("run, account                               " + "  ".join(f"{measure:>16}" for measure in MEASURES))
    for run, paper in published(FIGURES[model]).items():
        print(f"{' '.join(run[::2])}")
        print(f"  {'paper':<40} " + "  ".join(f"{paper[measure]:16.1f}" for measure in MEASURES))
        for name, config in accounts(model, [*run, *words]).items():
            told = memory_of(config)
            off = tuple(100 * (value / paper[measure] - 1) for value, measure in zip(told, MEASURES, strict=True))
            errors.setdefault(name, []).append(off)
            cells = (f"{value:7.1f} {error:+6.1f} %" for value, error in zip(told, off, strict=True))
            print(f"  {name:<40} " + "  ".join(cells), flush=True)
    print("median and worst error")
    for name, rows in errors.items():
        columns = [[abs(error) for error in column] for column in zip(*rows, strict=True)]
        cells = (f"{median(column):7.1f} {max(column):5.1f} %" for column in columns)
        print(f"  {name:<40} " + "  ".join(cells))


def accounts(model: str, words: list[str]) -> dict[str, RecipeConfig]:
    preset = f"experiment=paper/fig{FIGURES[model]}"
    assumed = checked(compose([preset, *words, "action=plan"])).plan
    loop = [f"plan.frees_gradients={assumed.frees_gradients}", f"plan.keeps_output={assumed.keeps_output}"]
    given: list[str] = []
    found = {}
    for name, more in ACCOUNTS.items():
        given += [*more, *(loop if name == "its loop" else ())]
        found[name] = checked(compose([preset, *words, *given, "action=plan"]))
    return found


def memory_of(config: RecipeConfig) -> tuple[float, float, float]:
    recorded = record_run(config, config.cluster.num_nodes * RANKS_PER_HOST, RANKS_PER_HOST)
    memory = predict(config, recorded, machine_of(config.hardware, RANKS_PER_HOST)).plan.memory
    return memory.allocated / 1e9, memory.active / 1e9, memory.needed / 1e9


if __name__ == "__main__":
    main(sys.argv[1:])
