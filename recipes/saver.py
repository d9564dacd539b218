"""When the loop saves, and what goes into a checkpoint beside model and optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes import random_state
from recipes.checkpoint.checkpointer import Checkpointer, TrainState
from recipes.checkpoint.due import SaveTimes
from recipes.checkpoint.every import Every, every_of
from recipes.checkpoint.folder import SAVE_TIME_FILE, checkpoints_of, final_name
from recipes.ranks import Ranks
from recipes.run_state import Part
from recipes.schema.training import CheckpointConfig


class Saver:
    """Saves the run at step boundaries; every method is collective but the two ``is_due``.

    parts: what of the run goes along, by name; more may be added before the first save.
    saved_step: the step that lies on the disk already, as after resuming from it.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        checkpointer: Checkpointer,
        ranks: Ranks,
        run_dir: Path,
        parts: dict[str, Part],
        saved_step: int | None = None,
    ) -> None:
        self._every = Every() if config.every is None else every_of(config.every)
        self._is_wanted = config.every is not None
        self._times = SaveTimes(self._every, ranks)
        self._checkpointer, self._ranks, self._run_dir = checkpointer, ranks, run_dir
        self.parts = parts
        self._resumed_step = saved_step

    def is_due(self, done: int) -> bool:
        """By the number of steps: every rank knows by itself."""
        return self._every.steps is not None and done % self._every.steps == 0

    def is_due_by_clock(self) -> bool:
        """Rank 0's opinion; the ranks agree on it at a step boundary."""
        return self._every.seconds is not None and self._times.wants(0)

    @property
    def save_s(self) -> float | None:
        """Measured seconds of the last save; None before the first."""
        return self._checkpointer.last_save_s

    def save(self, done: int, eval_loss: float | None = None, *, must_succeed: bool = False) -> None:
        """After ``done`` steps; written beside the next ones where ``checkpoint.asynchronous`` says so."""
        self._times.saved()
        self._checkpointer.save(self._state(done), eval_loss=eval_loss, must_succeed=must_succeed)

    def finish(self, done: int, eval_loss: float | None) -> None:
        """The run has ended: its last step is saved, if checkpoints are wanted at all, and everything is written."""
        self._wait()
        if self._is_wanted and done and not self._is_saved(done):
            self.save(done, eval_loss, must_succeed=True)
            self._wait()

    def save_and_wait(self, done: int) -> str:
        """The run must stop here, wanted or not: what is trained is on the disk when this returns. A line about it."""
        if not done:
            return "nothing was trained yet; start it again"
        self._wait()
        if not self._is_saved(done):
            self.save(done, must_succeed=True)
            self._wait()
        where = checkpoints_of(self._run_dir) / final_name(done)
        if not where.exists():  # resumed from there, and nothing done since
            return "nothing was trained since the start; start it again"
        return f"saved in {where}; the same command goes on from there (with run.dir={self._run_dir})"

    def _is_saved(self, done: int) -> bool:
        """Nothing may be in flight: a save that failed (``checkpoint.on_error=continue``) is none."""
        return done in (self._resumed_step, self._checkpointer.saved_step)

    def _wait(self) -> None:
        """Until the save in flight is complete; what it took stays in the run folder, for who sets the next limit."""
        self._checkpointer.wait()
        if self._ranks.is_main and self.save_s is not None:
            try:
                (self._run_dir / SAVE_TIME_FILE).write_text(f"{self.save_s:.3f}\n")
            except OSError:
                pass  # a hint, and no reason to fail

    def _state(self, done: int) -> TrainState:
        shared: dict[str, Any] = {name: part.state_dict() for name, part in self.parts.items()}
        return TrainState(done, shared, random_state.capture(self._ranks.device))
