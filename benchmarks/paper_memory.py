"""What decides the memory of the FSDP paper's GPT-175B (figure 8b): four accounts of the same run, beside the paper.

    python benchmarks/paper_memory.py [WORDS ...]

at once     as the engine does it: a large gradient is copied into its unit's source as soon as it is complete
at the end  gradients of a unit stay where autograd puts them until all are there, then they are copied (``cat``)
packed      the allocator begins the step with all that stays (weights, gradients, optimizer state) in segments of
            its own; otherwise the first step puts the optimizer's state into the holes that its backward left

GB of one rank, 1e9 bytes. Retries are not looked at: memory has no end here.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

from fsdp_core.runtime import unit
from fsdp_core.simulate import tape as t
from launcher.checked import checked
from launcher.compose import compose
from recipes.plan.machine import machine_of
from recipes.plan.predict import predict
from recipes.plan.record import RecordedRun, record_run
from recipes.plan.result import MemoryPlan
from recipes.schema import RecipeConfig

PUBLISHED = {  # (GPUs, samples of each): allocated, active, reserved
    (128, 1): (47, 63, 78),
    (192, 1): (40, 56, 71),
    (512, 1): (31, 46, 57),
    (128, 2): (54, 69, 80),
    (192, 2): (47, 63, 79),
    (512, 2): (37, 52, 67),
}


def config_of(gpus: int, batch: int, words: list[str]) -> RecipeConfig:
    size = [f"cluster.num_nodes={gpus // 8}", f"train.micro_batch={batch}", f"train.global_batch={batch * gpus}"]
    return checked(compose(["action=plan", "experiment=paper_gpt_175b", *size, *words]))


def packed(recorded: RecordedRun) -> RecordedRun:
    """The last step alone, on top of what is alive when it begins."""
    alive = {alloc.block: alloc for alloc in recorded.tape.held}
    for entry in recorded.tape.entries[: recorded.last_step]:
        if isinstance(entry, t.Alloc):
            alive[entry.block] = entry
        elif isinstance(entry, t.Free):
            del alive[entry.block]
    tape = t.Tape(entries=recorded.tape.entries[recorded.last_step :], held=list(alive.values()))
    return replace(recorded, tape=tape, last_step=0)


def main(words: list[str]) -> None:
    print("GPUs  batch  account              allocated  active  reserved")
    for (gpus, batch), published in PUBLISHED.items():
        print(f"{gpus:4}  {batch:5}  {'paper':<19}  " + "  ".join(f"{value:9.1f}" for value in published))
        config = config_of(gpus, batch, words)
        for collected, smallest in (("at once", unit.EARLY_NUMEL), ("at the end", sys.maxsize)):
            with mock.patch.object(unit, "EARLY_NUMEL", smallest):
                recorded = record_run(config, gpus, 8)
            for name, one in ((collected, recorded), (f"{collected}, packed", packed(recorded))):
                memory = predict(config, one, machine_of(config.hardware, 8)).plan.memory
                print(f"{gpus:4}  {batch:5}  {name:<19}  {numbers(memory)}", flush=True)


def numbers(memory: MemoryPlan) -> str:
    return "  ".join(f"{nbytes / 1e9:9.1f}" for nbytes in (memory.allocated, memory.active, memory.needed))


if __name__ == "__main__":
    main(sys.argv[1:])
