"""The tape of a run: the recipe's own ``build_trainee`` and ``train_step``, one rank of W, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from fsdp_core.describe import ModelReport
from fsdp_core.held_bytes import HeldBytes, held_bytes
from fsdp_core.simulate.habits import Habits
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
from recipes.schema.actions import PlanConfig
from recipes.schema.derived import micro_batch, num_micro_batches
from recipes.step import train_step

STEPS = 2  # the second one finds gathered buffers, optimizer state and the order of units as all later ones do


@dataclass(frozen=True)
class RecordedRun:
    """tape: of ``STEPS`` steps, with a mark ``step`` before each; shards are what it begins with.

    gradients: blocks that reduced gradients lie in. num_parameters: of the whole model.
    last_step: the entry where the last step begins. held: the engine's own ledger after the last step.
    unit, units_per_sample: what throughput counts, tokens or samples.
    """

    tape: Tape
    report: ModelReport
    info: DataInfo
    gradients: frozenset[int]
    num_parameters: int
    last_step: int
    held: HeldBytes
    world_size: int
    local_world_size: int
    unit: str
    units_per_sample: float


class GivenUp(Exception):
    """Nobody wants the recording any more; the message says why."""


class _MarkingClock(StepClock):
    """Phases of a step become marks on the tape."""

    def __init__(self, recorder: Recorder, why_not: Callable[[], str]) -> None:
        self._recorder, self._why_not = recorder, why_not

    def start(self) -> None:
        self._recorder.mark("step")

    def mark(self, phase: str) -> None:
        self._recorder.mark("phase", phase=phase)
        if why := self._why_not():
            raise GivenUp(why)

    def finish(self) -> StepTimes:
        return _NoTimes()


class _NoTimes(StepTimes):
    """On paper nothing was timed."""

    def read(self) -> dict[str, float]:
        return {}


def habits_of(config: PlanConfig) -> Habits:
    return Habits(
        concatenates_gradients=config.gradients == "concatenated",
        frees_gradients=config.frees_gradients,
        keeps_output=config.keeps_output,
    )


def habits_in_words(config: PlanConfig) -> tuple[str, ...]:
    """Those that this engine has not, as they would be typed."""
    own = asdict(PlanConfig())
    other = {key: value for key, value in asdict(config).items() if value != own[key]}
    return tuple(f"plan.{key}={str(value).lower()}" for key, value in other.items())


def as_it_runs(config: RecipeConfig) -> RecipeConfig:
    """Without habits assumed of others: what the run itself takes."""
    return replace(config, plan=PlanConfig())


def _paper_world(recorder: Recorder, world_size: int) -> PaperWorld:
    """For tables that exchange rows over all ranks by themselves."""
    everyone = tuple(range(world_size))
    return PaperWorld(0, world_size, lambda received, sent: recorder.all_to_all(received, sent, everyone))


def record_run(
    config: RecipeConfig,
    world_size: int,
    local_world_size: int,
    steps: int = STEPS,
    is_inline: bool | None = None,
    shares_memory: bool | None = None,
    info: DataInfo | None = None,
    why_not: Callable[[], str] = str,
) -> RecordedRun:
    """One rank of ``world_size``, with hosts of ``local_world_size``; rank 0, and all ranks do the same.

    is_inline: on devices that compute as CPUs do, without streams that lag behind the host; None: as the config's
        hardware does.
    shares_memory: hosts have the wire of shared memory; None: where they compute as CPUs do and no other is asked for.
    info: the data's facts, where it has been read; None: what the config says of them.
    why_not: asked after each forward and backward; a text gives the recording up.

    Raises:
        UnknownSize: only the data can tell a size that the model needs. GivenUp: ``why_not`` said so.
    """
    info = expected_info(config) if info is None else info
    is_inline = config.hardware.device == "cpu" if is_inline is None else is_inline
    if shares_memory is None:
        shares_memory = is_inline and config.sharding.wire in ("auto", "shared_memory")
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
    habits = habits_of(config.plan)
    gradients: set[int] = set()
    with Recorder() as recorder, stand_in(_paper_world(recorder, world_size)), habits.while_built(recorder):
        compares_first = is_inline and config.sharding.wire == "collectives"
        paper = recorder.ranks(0, world_size, is_inline, shares_memory, compares_first)
        built = build_trainee(config, context, ranks, info, process_group=paper)
        model = built.trainee.model
        recorder.follow(model)
        habits.watch(model)
        recorder.begin_tape()  # not before: on the meta device the whole model was there for a moment
        clock = _MarkingClock(recorder, why_not)
        for _ in range(steps):
            clock.start()
            train_step(built.trainee, micro_batches, 1e-3, clock)
            gradients |= recorder.gradient_blocks(model)
            habits.after_step(model)
        tape = recorder.end_tape()
        held = held_bytes(model)
    begins = [index for index, entry in enumerate(tape.entries) if isinstance(entry, Mark) and entry.kind == "step"]
    task = built.trainee.task
    return RecordedRun(
        tape=tape,
        report=built.groups.report,
        info=info,
        gradients=frozenset(gradients),
        num_parameters=built.num_parameters,
        last_step=begins[-1],
        held=held,
        world_size=world_size,
        local_world_size=local_world_size,
        unit=task.throughput_unit,
        units_per_sample=task.count_units(batch) / micro_batch(config.train, world_size),
    )
