"""Going on where an earlier start stopped: find the newest whole checkpoint, load it, cut the batch as before.

Which one is decided here and now, by rank 0, from what lies on the disk. Checksums are compared before anything of a
checkpoint is loaded, so that a damaged one is passed over whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from recipes import random_state
from recipes.checkpoint.checkpointer import Checkpointer, TrainState
from recipes.checkpoint.errors import CheckpointError, DamagedCheckpoint
from recipes.checkpoint.manifest import read_manifest
from recipes.context import RankContext
from recipes.data.errors import DataError
from recipes.loggers.base import Start
from recipes.ranks import Ranks
from recipes.report import Report
from recipes.resume_from import candidates
from recipes.run_state import Part
from recipes.schema import RecipeConfig
from recipes.schema.derived import divisors, micro_batch


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from. world_size, micro_batch: of the run that saved it."""

    folder: Path
    state: TrainState
    world_size: int
    micro_batch: int

    @property
    def start(self) -> Start:
        return Start(self.state.step, not self.state.shared["loop"]["is_evaluation_due"])


def resume(
    config: RecipeConfig, context: RankContext, ranks: Ranks, checkpointer: Checkpointer, report: Report
) -> Resumed | None:
    """Model and optimizers from the newest whole checkpoint; None: there is none, the run starts. Collective.

    Raises:
        CheckpointError: there are checkpoints and none of them is whole, or the newest whole one is of another model,
            or ``checkpoint.resume`` names a place without one. The same on every rank.
    """
    problems = []
    for folder in _told(config, context, ranks):
        try:
            state = checkpointer.load(folder)
        except DamagedCheckpoint as damage:
            problems.append(str(damage))
            report.line(f"checkpoint passed over: {damage}")
            continue
        manifest = read_manifest(folder)
        train = manifest.config["train"]
        cut = train["micro_batch"] or train["global_batch"] // manifest.world_size
        return Resumed(folder, state, manifest.world_size, cut)
    if problems:
        count = len(problems)
        told = (
            "the checkpoint cannot be used"
            if count == 1
            else f"none of the {count} checkpoints can be used; the newest"
        )
        raise CheckpointError(
            f"{told}: {problems[0]}. checkpoint.resume=PATH names another one, checkpoint.resume=never starts over"
        )
    return None


def restore(
    resumed: Resumed, parts: dict[str, Part], config: RecipeConfig, context: RankContext, report: Report
) -> None:
    """Everything beside model and optimizers. A part that the checkpoint does not know starts anew; random streams of
    other ranks than then are fresh ones.

    Raises:
        DataError: the data are others, and ``checkpoint.allow_drift`` does not say that this is meant.
    """
    shared, saved = resumed.state.shared, resumed.state.per_rank
    for name, part in parts.items():
        if shared.get(name) is None:
            continue
        try:
            part.load_state_dict(shared[name])
        except DataError as error:
            if not config.checkpoint.allow_drift:
                remedy = "checkpoint.allow_drift=true goes on with these data, from their beginning"
                raise DataError(f"{error}; {remedy}") from None
            report.line(f"the data are taken from their beginning: {error}")
    if saved:
        random_state.restore(saved, torch.device(context.device))
    else:
        random_state.reseed(config.run, context.rank, resumed.state.step)


def with_the_same_batch(config: RecipeConfig, resumed: Resumed, world_size: int) -> tuple[RecipeConfig, str | None]:
    """The config with a micro-batch that fits this number of ranks, and a line that says so.

    The global batch stays. Where the config leaves ``train.micro_batch`` open, fewer ranks accumulate rather than
    take larger micro-batches than the run had: those may not fit into memory.
    """
    train = config.train
    if train.micro_batch is not None or world_size == resumed.world_size:
        return config, None
    per_rank = train.global_batch // world_size
    cut = max(size for size in divisors(per_rank) if size <= max(1, resumed.micro_batch))
    if cut == micro_batch(train, world_size):
        return config, None
    changed = copy.copy(config)
    changed.train = copy.copy(train)
    changed.train.micro_batch = cut
    times = per_rank // cut
    return changed, f"global batch {train.global_batch} kept: {cut} x {world_size} ranks x {times} micro-batches"


def resumed_lines(resumed: Resumed, world_size: int, batch_line: str | None) -> Iterator[str]:
    yield f"resumed from step {resumed.state.step} of {resumed.folder}"
    if resumed.world_size != world_size:
        yield f"saved by {resumed.world_size} ranks, resharded to {world_size}"
    if batch_line is not None:
        yield batch_line


def _told(config: RecipeConfig, context: RankContext, ranks: Ranks) -> list[Path]:
    """Rank 0 looks. What it cannot find is an error on every rank."""
    found: list[str] = []
    problem = None
    if ranks.is_main:
        try:
            found = [str(one.path) for one in candidates(config.checkpoint.resume, Path(context.run_dir))]
        except CheckpointError as error:
            problem = str(error)
    found, problem = ranks.tell([found, problem])
    if problem is not None:
        raise CheckpointError(problem)
    return [Path(path) for path in found]
