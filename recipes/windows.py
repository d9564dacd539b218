"""Things that watch a window of steps: torch's profiler, and the engine's event log."""

from __future__ import annotations

import abc
import dataclasses
import json
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fsdp_core
from fsdp_core.trace.events import EventLog
from recipes.context import RankContext
from recipes.schema.training import TrainConfig


class StepWindow(abc.ABC):
    """Told of every step. Step k is the k-th from 0, the line ``step: k + 1`` of metrics.jsonl."""

    @abc.abstractmethod
    def step_begins(self, step: int) -> None: ...

    @abc.abstractmethod
    def step_ended(self, step: int) -> str | None:
        """A line for people when something was written."""

    @abc.abstractmethod
    def close(self) -> str | None:
        """The run has ended, perhaps inside the window; what was recorded is written. Idempotent."""


class ProfileWindow(StepWindow):
    """Steps ``[first, last)`` of this rank into ``<folder>/rank<r>.json.gz``, to open in Perfetto or chrome://tracing.

    Recording slows these steps down.
    """

    def __init__(self, steps: tuple[int, int], folder: Path, rank: int, device: torch.device) -> None:
        self._steps, self._device = steps, device
        self._path = folder / f"rank{rank}.json.gz"
        self._profile: profile | None = None

    def step_begins(self, step: int) -> None:
        if step == self._steps[0]:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()

    def step_ended(self, step: int) -> str | None:
        return self.close() if step + 1 >= self._steps[1] else None

    def close(self) -> str | None:
        if self._profile is None:
            return None
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
        self._profile = None
        return f"profile of steps [{self._steps[0]}, {self._steps[1]}): {self._path}"


class TraceWindow(StepWindow):
    """The engine's event log: of steps ``[first, last)`` into ``<folder>/rank<r>.jsonl``, one event a line, in order;
    and, if asked for, of every step to the engine's schedule check, which raises on all ranks what is wrong with it.
    """

    def __init__(
        self, steps: tuple[int, int], folder: Path, rank: int, model: nn.Module, *, has_check: bool = False
    ) -> None:
        self._steps, self._has_check = range(*steps), has_check
        self._path = folder / f"rank{rank}.jsonl"
        self._model = model
        self._log: EventLog | None = None
        self._lines: list[str] = []
        self._is_written = False

    def step_begins(self, step: int) -> None:
        if self._has_check or step in self._steps:
            self._log = fsdp_core.start_trace(self._model, has_clock=step in self._steps)

    def step_ended(self, step: int) -> str | None:
        log, self._log = self._log, None
        if log is None:
            return None
        fsdp_core.stop_trace(self._model)
        if step in self._steps:
            self._lines += [json.dumps({"step": step + 1} | dataclasses.asdict(event)) for event in log.events]
        written = self.close() if step + 1 == self._steps.stop else None
        if self._has_check:
            fsdp_core.verify_schedule(self._model, log)
        return written

    def close(self) -> str | None:
        if self._is_written or not self._lines:
            return None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("\n".join(self._lines) + "\n", encoding="utf-8")
        self._is_written = True
        return f"trace of steps [{self._steps.start}, {self._steps.stop}): {self._path}"


def windows_of(train: TrainConfig, context: RankContext, model: nn.Module) -> tuple[StepWindow, ...]:
    """What ``train.profile_steps``, ``train.trace`` and ``train.check_schedule`` ask for, under the run folder."""
    windows: list[StepWindow] = []
    run_dir, steps = Path(context.run_dir), train.profile_steps
    window = (steps[0], steps[1]) if steps is not None else None
    if window is not None:
        windows.append(ProfileWindow(window, run_dir / "profile", context.rank, torch.device(context.device)))
    if train.trace or train.check_schedule:
        traced = (window or (0, 3)) if train.trace else (0, 0)
        trace = TraceWindow(traced, run_dir / "trace", context.rank, model, has_check=train.check_schedule)
        windows.append(trace)
    return tuple(windows)
