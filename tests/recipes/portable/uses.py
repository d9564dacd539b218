"""What ranks run in ``test_uses``."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from recipes import evaluation, generation
from recipes.build import build_trainee
from recipes.checkpoint.checkpointer import Checkpointer, TrainState
from recipes.evaluate import evaluate
from recipes.evaluation import Evaluated
from recipes.metrics.clock import step_clock
from recipes.prepare import eval_batches, prepare_splits, train_batches
from recipes.ranks import Ranks
from recipes.report import Report
from recipes.schema import RecipeConfig
from recipes.seeds import seed_training
from recipes.step import train_step
from tests.recipes.loop.recipes_in_tests import context_of, small_recipe
from tests.recipes.portable.made import config_of
from tests.support.ranks import Rank


def train_and_save(rank: Rank | None, kind: str, run_dir: str) -> dict[str, float]:
    """Three steps, an evaluation, a checkpoint; the evaluation's numbers."""
    config = evaluating(kind)
    context = context_of(rank)
    ranks, report = Ranks.of(context), Report(False, False)
    splits = prepare_splits(config, ranks, report)
    trainee = build_trainee(config, context, ranks, splits.info).trainee
    seed_training(config.run, context.rank)
    with train_batches(config, splits, ranks) as batches:
        clock = step_clock(ranks.device)
        for _ in range(3):
            clock.start()
            train_step(trainee, next(batches), 1e-2, clock)
    held_out = eval_batches(config, splits, ranks)
    assert held_out is not None
    metrics = evaluate(trainee.model, trainee.task, held_out, ranks)
    saver = Checkpointer(
        Path(run_dir) / "checkpoints",
        trainee,
        ranks,
        config.checkpoint,
        attempt=0,
        config_tree=dataclasses.asdict(config),
    )
    saver.save(TrainState(3, {}, {}))
    saver.wait()
    return metrics


def evaluating(kind: str, **changes: Any) -> RecipeConfig:
    config = small_recipe(kind, train__eval_samples=10, train__global_batch=4, **changes)
    config.data.cache_dir = tempfile.gettempdir()  # nothing is written there
    return config


def evaluate_again(rank: Rank | None, kind: str, run_dir: str, factor: int | None) -> Evaluated:
    config = evaluating(kind, train__micro_batch=2, sharding__factor=factor)
    config.checkpoint.resume = str(Path(run_dir) / "checkpoints" / "step_00000003")
    return evaluation.run(config, context_of(rank, Path(run_dir)))


def write_texts(rank: Rank | None, checkpoints: dict[str, str], run_dir: str) -> list[str]:
    """Greedy, and drawn with seed 5, by each model."""
    texts = []
    for preset, checkpoint in checkpoints.items():
        config = config_of(preset)
        config.checkpoint.resume = checkpoint
        config.generate.prompt, config.generate.max_new_tokens = "def <extra_id_0>(x):", 12
        for temperature, seed in ((0.0, 0), (0.9, 5)):
            config = copy.deepcopy(config)
            config.generate.temperature, config.generate.seed = temperature, seed
            texts.append(generation.run(config, context_of(rank, Path(run_dir))).text)
    return texts
