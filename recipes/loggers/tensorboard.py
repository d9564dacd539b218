"""TensorBoard event files under ``<run folder>/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from recipes.loggers.base import FROM_THE_BEGINNING, Logger, Start, Value
from recipes.plan.compared import markdown_of


class TensorboardLogger(Logger):
    """Raises ModuleNotFoundError with the way to get it where the package ``tensorboard`` is missing."""

    def __init__(self, folder: Path, start: Start = FROM_THE_BEGINNING) -> None:
        try:  # an extra, and slow to import: only where asked for
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ModuleNotFoundError(
                "logger=tensorboard needs the package tensorboard; install it with "
                "pip install 'fsdp-launcher[tensorboard]', or leave it out of logger=[...]"
            ) from error
        # Events of steps that will be run again are hidden, as TensorBoard does for a restarted job.
        first = start.steps_done + (1 if start.is_evaluation_done else 0)
        self._writer = SummaryWriter(str(folder), purge_step=first if start.steps_done else None)

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        for name, value in metrics.items():
            if value is not None and name != "step":
                self._writer.add_scalar(_tag(name), value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, summary: Mapping[str, object] | None) -> None:
        plan = (summary or {}).get("plan")
        if isinstance(plan, Mapping):
            self._writer.add_text("plan", markdown_of(plan))
        self._writer.close()


def _tag(name: str) -> str:
    """TensorBoard groups by the part before the slash."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
