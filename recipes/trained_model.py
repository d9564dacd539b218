"""A trained model, sharded, without optimizers: what evaluating and generating start from."""

from __future__ import annotations

from pathlib import Path

from recipes.build import ShardedModel, build_sharded
from recipes.checkpoint.checkpointer import open_together
from recipes.checkpoint.errors import CheckpointError
from recipes.checkpoint.fit import model_problems
from recipes.checkpoint.restore import load_model
from recipes.context import RankContext
from recipes.data.records import DataInfo
from recipes.ranks import Ranks
from recipes.report import Report
from recipes.schema import RecipeConfig


def trained_model(
    config: RecipeConfig, context: RankContext, ranks: Ranks, info: DataInfo, report: Report
) -> tuple[ShardedModel, int | None]:
    """The model of ``checkpoint.resume``, or of ``model.init_from``; the checkpoint's step, or None. Collective.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model; the same on every rank.
        FolderError: as ``recipes.portable.init_from``.
    """
    sharded = build_sharded(config, context, ranks, info)
    report.line(f"model: {config.model.kind}, {sharded.num_parameters:,} parameters")
    if config.model.init_from is not None:
        report.line(f"weights of {config.model.init_from}")
        return sharded, None
    reader = open_together(Path(config.checkpoint.resume), ranks)
    problems = model_problems(reader, sharded.model)
    if problems:
        raise CheckpointError(
            "\n".join([f"{reader.folder}: a checkpoint of another model", *(f"  {problem}" for problem in problems)])
        )
    load_model(reader, sharded.model)
    report.line(f"weights after step {reader.manifest.step}: {reader.folder}")
    return sharded, reader.manifest.step
