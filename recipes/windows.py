"""Things that watch a window of steps: torch's profiler, and the engine's event log."""

from __future__ import annotations

import abc
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


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
