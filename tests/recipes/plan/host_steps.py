"""Steps on ranks of two hosts, and what the hosts' interfaces sent meanwhile. Runs on a rank of ``HostRanks``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from recipes.metrics.clock import HostClock
from recipes.schema import RecipeConfig
from recipes.step import train_step
from tests.recipes.plan.real_steps import trainee_of


def crossed(rank: int, config: RecipeConfig, ranks_per_host: int, steps: int) -> Any:
    """What this rank's host sent to the other one in ``steps`` steps (``Sent``)."""
    from paper_runs.namespaces import sent_by_host  # found by the ranks of the benchmarks only

    trainee, batches = trainee_of(rank, dist.get_world_size(), config, ranks_per_host)
    clock = HostClock()
    for step in range(steps + 1):
        if step == 1:  # the first one opens connections
            dist.barrier()
            before = sent_by_host()
            dist.barrier()  # nobody sends before all have looked
        clock.start()
        train_step(trainee, batches, 1e-3, clock)
    dist.barrier()
    return sent_by_host().since(before)
