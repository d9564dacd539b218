"""The drift guard's refusals: what a run that goes on from a checkpoint may not change, or not without a word."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.check.about import About
from launcher.check.rules.rule import Rules
from launcher.drift import INCOMPATIBLE, NUMBERS, SAFE, in_words
from launcher.errors import Problem
from launcher.resuming import GoingOn, going_on
from launcher.schema import Config
from recipes.checkpoint.errors import CheckpointError

RULES = Rules()
_WHAT = {
    INCOMPATIBLE: "another value than in the checkpoint, which then means nothing here",
    NUMBERS: "another value than in the checkpoint: from here on it would be another run",
}
_REMEDY = {
    INCOMPATIBLE: "run.dir=ANOTHER for a new run, checkpoint.resume=never to start over here, or the old value",
    NUMBERS: "checkpoint.allow_drift=true goes on with the new values; or the old value",
}


@RULES.reading("run", "model", "data", "optimizer", "scheduler", "train", "precision", "checkpoint")
def drift(config: Config, about: About) -> Iterator[Problem]:
    """Asked where a command is typed; the ranks read back what passed."""
    if not about.is_typed:
        return
    try:
        found = going_on(config)
    except CheckpointError as error:
        yield about.problem(
            "checkpoint.resume",
            str(error),
            got=config.checkpoint.resume,
            remedy="checkpoint.resume=auto goes on from run.dir's own checkpoints",
        )
        return
    if found is not None:
        yield from _refused(found, config, about)
        yield from _past_the_end(found, config, about)


def _refused(found: GoingOn, config: Config, about: About) -> Iterator[Problem]:
    for one in found.changed:
        if one.kind == SAFE or (one.kind == NUMBERS and config.checkpoint.allow_drift):
            continue
        yield about.problem(
            one.key,
            _WHAT[one.kind],
            got=in_words(one.now),
            expected=f"{in_words(one.was)}, as {found.where} has it",
            remedy=_REMEDY[one.kind],
        )


def _past_the_end(found: GoingOn, config: Config, about: About) -> Iterator[Problem]:
    if found.manifest.step > config.train.steps:
        yield about.problem(
            "train.steps",
            "the run is further than this already",
            got=config.train.steps,
            expected=f"at least {found.manifest.step}, as {found.where} is",
            remedy=f"train.steps={found.manifest.step}, or checkpoint.resume=PATH with an earlier checkpoint",
        )
