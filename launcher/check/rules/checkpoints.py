"""Rules about saving."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.check.about import About
from launcher.check.rules.rule import Rules
from launcher.errors import Problem
from launcher.schema import Config
from recipes.checkpoint import every

RULES = Rules()


@RULES.reading("checkpoint.every")
def how_often(config: Config, about: About) -> Iterator[Problem]:
    if config.checkpoint.every is None:
        return
    try:
        every.every_of(config.checkpoint.every)
    except ValueError as error:
        yield about.problem(
            "checkpoint.every",
            str(error),
            got=config.checkpoint.every,
            expected=every.EXPECTED,
            remedy="checkpoint.every=1000, or checkpoint.every=10min",
        )


@RULES.reading("checkpoint.keep_best", "train.eval_samples", "checkpoint.every")
def best(config: Config, about: About) -> Iterator[Problem]:
    if config.checkpoint.keep_best and config.train.eval_samples == 0:
        yield about.problem(
            "checkpoint.keep_best",
            "the best checkpoints are told by the held-out loss, and nothing is evaluated",
            got=config.checkpoint.keep_best,
            remedy="train.eval_samples=256 with train.eval_every, or checkpoint.keep_best=0",
            also=("train.eval_samples",),
        )
