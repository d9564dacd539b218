"""What a worker answers to its fleet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """Some steps on one rank: seconds of the clock, seconds of user and system time of all threads, last loss."""

    wall_s: float
    cpu_s: float
    loss: float


@dataclass(frozen=True)
class Failed:
    """A worker's traceback."""

    text: str
