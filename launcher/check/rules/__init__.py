"""Cross-field rules by subject."""

from launcher.check.rules import (
    actions,
    checkpoints,
    data,
    models,
    planning,
    plugins,
    ranks,
    resuming,
    slurm,
    sweeps,
    training,
)
from launcher.check.rules.rule import Rule

RULES: list[Rule] = [
    *plugins.RULES,
    *ranks.RULES,
    *slurm.RULES,
    *training.RULES,
    *models.RULES,
    *data.RULES,
    *checkpoints.RULES,
    *sweeps.RULES,
    *actions.RULES,
    *planning.RULES,
    *resuming.RULES,
]

__all__ = ["RULES", "Rule"]
