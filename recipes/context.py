"""``RankContext``: what a rank knows about the run it is part of. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from recipes.flight import NO_FLIGHT, FlightRecorder
from recipes.stop import StopRequest


@dataclass(frozen=True)
class RankContext:
    """Decided by the launcher before the recipe starts; the default process group exists when world_size > 1.

    rank, world_size: this process among all.
    local_rank, local_world_size: this process among those of its host.
    node_rank, num_nodes: this host among all.
    hostnames: host of every rank, in rank order.
    device: ``cpu`` or ``cuda:<index>``; already current on CUDA.
    run_dir: the run folder; exists on every rank.
    is_interactive: rank 0 may draw a progress bar.
    flight: told what this rank is about to do, for the report of a hang.
    stop: asks this rank to stop at a step boundary.
    attempt: how many times ranks were started in this run folder, from 1; the same on all ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    hostnames: tuple[str, ...]
    device: str
    run_dir: Path
    is_interactive: bool = False
    attempt: int = 1
    stop: StopRequest = field(default_factory=StopRequest)
    flight: FlightRecorder = NO_FLIGHT

    @property
    def is_main(self) -> bool:
        return self.rank == 0
