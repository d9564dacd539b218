"""Which complete checkpoints stay. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.checkpoint.folder import Found


def to_remove(found: Sequence[Found], *, keep_last: int, keep_every: int | None, keep_best: int) -> list[Found]:
    """Of ``found`` those that no rule keeps: the newest ``keep_last``, every step that ``keep_every`` divides, the
    ``keep_best`` with the lowest held-out loss (the earlier of equals; a loss that is no number is none)."""
    by_step = sorted(found, key=lambda one: one.step)
    kept = {one.step for one in by_step[-keep_last:]}
    if keep_every is not None:
        kept |= {one.step for one in by_step if one.step % keep_every == 0}
    measured = [(one.eval_loss, one.step) for one in by_step if one.eval_loss is not None]
    ranked = sorted((loss, step) for loss, step in measured if loss == loss)
    kept |= {step for _, step in ranked[:keep_best]}
    return [one for one in by_step if one.step not in kept]
