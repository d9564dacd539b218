"""The tape of a run: the recipe's own ``build_trainee`` and ``train_step``, one rank of W, on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_core.describe import ModelReport
from fsdp_core.simulate.recording import Recorder
from fsdp_core.simulate.tape import Mark, Tape
from recipes.build import build_trainee
from recipes.context import RankContext
from recipes.data.records import DataInfo
from recipes.metrics.clock import StepClock, StepTimes
from recipes.models.dhen.exchange import PaperWorld, stand_in
from recipes.plan.paper_ranks import PaperRanks
from recipes.plan.samples import expected_info, sample_batch
from recipes.schema import RecipeConfig
from recipes.schema.derived import micro_batch, num_micro_batches
from recipes.step import train_step

STEPS = 2  # the second one finds gathered buffers, optimizer state and the order of units as all later ones do


@dataclass(frozen=True)
class RecordedRun:
    """tape: of ``STEPS`` steps, with a mark ``step`` before each; shards are what it begins with.

    gradients: blocks that reduced gradients lie in. num_parameters: of the whole model.
    last_step: the entry where the last step begins.
    unit, units_per_sample: what throughput counts, tokens or samples.
    """

    tape: Tape
    report: ModelReport
    info: DataInfo
    gradients: frozenset[int]
    num_parameters: int
    last_step: int
    world_size: int
    local_world_size: int
    unit: str
    units_per_sample: float


class _MarkingClock(StepClock):
    """Phases of a step become marks on the tape."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def start(self) -> None:
        self._recorder.mark("step")

    def mark(self, phase: str) -> None:
        self._recorder.mark("phase", phase=phase)

    def finish(self) -> StepTimes:
        return _NoTimes()


class _NoTimes(StepTimes):
    """On paper nothing was timed."""

    def read(self) -> dict[str, float]:
        return {}


def _paper_world(recorder: Recorder, world_size: int) -> PaperWorld:
    """For tables that exchange rows over all ranks by themselves."""
    everyone = tuple(range(world_size))
    return PaperWorld(0, world_size, lambda received, sent: recorder.all_to_all(received, sent, everyone))


def record_run(
    config: RecipeConfig, world_size: int, local_world_size: int, steps: int = STEPS, is_inline: bool = False
) -> RecordedRun:
    """One rank of ``world_size``, with hosts of ``local_world_size``; rank 0, and all ranks do the same.

    is_inline: on devices that compute as CPUs do, without streams that lag behind the host.

    Raises:
        UnknownSize: only the data can tell a size that the model needs.
    """
    info = expected_info(config)
    device = torch.device("meta")
    context = RankContext(
        rank=0,
        world_size=world_size,
        local_rank=0,
        local_world_size=local_world_size,
        node_rank=0,
        num_nodes=-(-world_size // local_world_size),
        hostnames=tuple(f"host{rank // local_world_size}" for rank in range(world_size)),
        device="meta",
        run_dir=Path("."),
    )
    ranks = PaperRanks(0, world_size, device)
    batch = sample_batch(info, micro_batch(config.train, world_size))
    micro_batches = [batch] * num_micro_batches(config.train, world_size)
    with Recorder() as recorder, stand_in(_paper_world(recorder, world_size)):
        built = build_trainee(config, context, ranks, info, process_group=recorder.ranks(0, world_size, is_inline))
        recorder.follow(built.trainee.model)
        recorder.begin_tape()  # not before: on the meta device the whole model was there for a moment
        clock = _MarkingClock(recorder)
        for _ in range(steps):
            clock.start()
            train_step(built.trainee, micro_batches, 1e-3, clock)
        tape = recorder.end_tape()
        gradients = recorder.gradient_blocks(built.trainee.model)
    begins = [index for index, entry in enumerate(tape.entries) if isinstance(entry, Mark) and entry.kind == "step"]
    task = built.trainee.task
    return RecordedRun(
        tape=tape,
        report=built.groups.report,
        info=info,
        gradients=gradients,
        num_parameters=built.num_parameters,
        last_step=begins[-1],
        world_size=world_size,
        local_world_size=local_world_size,
        unit=task.throughput_unit,
        units_per_sample=task.count_units(batch) / micro_batch(config.train, world_size),
    )
