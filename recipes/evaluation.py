"""``run``: one rank of ``action=eval``: a trained model on the held-out samples that its training evaluates on."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.boundary import Boundary
from recipes.context import RankContext
from recipes.data.errors import DataError
from recipes.evaluate import CutShort, evaluate
from recipes.loggers.jsonl import strict
from recipes.prepare import eval_batches, prepare_splits
from recipes.ranks import Ranks
from recipes.registry import MODELS
from recipes.report import Report
from recipes.schema import RecipeConfig
from recipes.seeds import choose_kernels
from recipes.stop import StoppedFromOutside
from recipes.tasks import task_for
from recipes.trained_model import trained_model

FILE = "evaluation.json"


@dataclass(frozen=True)
class Evaluated:
    """weights: the checkpoint, or the folder, they came from. step: null for a folder. metrics: as in training."""

    weights: str
    step: int | None
    metrics: dict[str, float | None]
    num_samples: int
    world_size: int
    wall_s: float


def run(config: RecipeConfig, context: RankContext) -> Evaluated:
    """Prints the metrics and leaves ``evaluation.json`` in the run folder (rank 0). Called by every rank.

    Raises:
        DataError: nothing is held out. Others: as ``trained_model``.
        StoppedFromOutside: ``context.stop`` asked for it, on every rank alike; there is no result.
    """
    started = time.perf_counter()
    ranks, report = Ranks.of(context), Report.of(context)
    choose_kernels(config.run)
    splits = prepare_splits(config, ranks, report)
    held_out = eval_batches(config, splits, ranks)
    if held_out is None:
        raise DataError(
            "nothing is held out to evaluate on; expected data.eval_fraction and train.eval_samples above 0: "
            "data.eval_fraction=0.02 train.eval_samples=256"
        )
    sharded, step = trained_model(config, context, ranks, splits.info, report)
    task = task_for(MODELS[config.model.kind].task, splits.info)
    boundary = Boundary(ranks, context.stop)
    try:
        metrics = evaluate(sharded.model, task, held_out, ranks, boundary.is_evaluation_over)
    except CutShort:
        why = boundary.reason()
        report.line(f"evaluation stopped by {why}: it has no result; the same command starts it again")
        raise StoppedFromOutside(why, step or 0) from None
    result = Evaluated(
        weights=config.model.init_from or config.checkpoint.resume,
        step=step,
        metrics={name: strict(value) for name, value in metrics.items()},
        num_samples=held_out.num_samples,
        world_size=ranks.world_size,
        wall_s=time.perf_counter() - started,
    )
    file = Path(context.run_dir) / FILE
    if context.is_main:
        file.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    for name, value in metrics.items():
        report.line(f"held-out {name.replace('_', ' ')}: {value:.6f}")
    report.line(f"of {held_out.num_samples} samples on {ranks.world_size} ranks: {file}")
    report.close()
    return result
