"""Where a step's time goes. Host clock on CPU; CUDA events on the compute stream, read once per log.

On CUDA the host runs ahead of the device, so a host clock would time the launching. An event pair around
``data`` shows the time the device stood waiting for data; when the host is ahead it is close to 0.
"""

from __future__ import annotations

import abc
import time

import torch

PHASES = ("data", "forward", "backward", "optimizer")


class StepClock(abc.ABC):
    """One step: ``start()``, then ``mark(phase)`` at the end of each stretch; phases may repeat."""

    @abc.abstractmethod
    def start(self) -> None:
        """A new step begins now."""

    @abc.abstractmethod
    def mark(self, phase: str) -> None:
        """The time since the last mark (or start) went to ``phase``."""

    @abc.abstractmethod
    def finish(self) -> StepTimes:
        """The step has ended. The times can be read later."""


class StepTimes(abc.ABC):
    """Times of one finished step."""

    @abc.abstractmethod
    def read(self) -> dict[str, float]:
        """Seconds by phase. On CUDA waits for the step's last event."""


class HostClock(StepClock):
    def __init__(self) -> None:
        self._last = 0.0
        self._seconds: dict[str, float] = {}

    def start(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now

    def finish(self) -> StepTimes:
        return _HostTimes(self._seconds)


class _HostTimes(StepTimes):
    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def read(self) -> dict[str, float]:
        return dict(self._seconds)


class CudaClock(StepClock):
    def __init__(self) -> None:
        self._events: list[tuple[str, torch.cuda.Event]] = []

    def start(self) -> None:
        self._events = []
        self.mark("start")

    def mark(self, phase: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((phase, event))

    def finish(self) -> StepTimes:
        return _CudaTimes(self._events)


class _CudaTimes(StepTimes):
    def __init__(self, events: list[tuple[str, torch.cuda.Event]]) -> None:
        self._events = events

    def read(self) -> dict[str, float]:
        seconds = dict.fromkeys(PHASES, 0.0)
        self._events[-1][1].synchronize()
        for (_, before), (phase, after) in zip(self._events, self._events[1:], strict=False):
            seconds[phase] += before.elapsed_time(after) / 1e3
        return seconds


def step_clock(device: torch.device) -> StepClock:
    return CudaClock() if device.type == "cuda" else HostClock()
