"""What runs a sweep's jobs: this machine or SLURM, behind four calls."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.sweep.record import Job


@dataclass(frozen=True)
class Event:
    """A job has ``started``, ``ended``, or there is a ``note`` about it for people. Its record has been written."""

    what: str
    number: int
    note: str = ""


class Backend(abc.ABC):
    """Starts jobs and says how they end. Whoever uses one holds the sweep's lock.

    name: stands in each job's record. outlives: its jobs go on when this program ends.
    """

    name: str
    outlives: bool

    @abc.abstractmethod
    def describe(self) -> list[str]:
        """Lines for people: what jobs get of the machine."""

    @abc.abstractmethod
    def submit(self, jobs: Sequence[Job]) -> None:
        """Take these over, in this order. Each is claimed in its record before it starts.

        Raises:
            ConfigErrors: none of them is started.
        """

    @abc.abstractmethod
    def poll(self, wait_s: float) -> list[Event]:
        """What happened since the last call; waits up to ``wait_s`` for something to happen."""

    @abc.abstractmethod
    def stop(self, signum: int) -> None:
        """Start nothing more, and end what runs, as this signal would; the second call ends it at once."""

    @property
    @abc.abstractmethod
    def is_busy(self) -> bool:
        """Whether a job runs or waits to be started."""
