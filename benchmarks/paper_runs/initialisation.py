"""Time and memory of the ways to give a sharded model its first values, each on all ranks at once.

``benchmarks/init.py`` times the pieces one by one in a single process, up to 175 billion parameters recorded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

import fsdp_core
from fsdp_core import deferred_init, materialize, seeded_init
from paper_runs.answer import Answer, Table
from paper_runs.decoder import Block, Decoder, Sizes
from paper_runs.memory_probe import forget_peak, peak_bytes, resident_bytes, settle
from paper_runs.ranks import Pool, Ranks

STATEMENT = (
    "Sections 3.1 and 4.1: deferred initialisation, and streaming from the CPU where a model cannot be recorded, "
    "which 'may be slower'. Neither time nor memory was given for any way."
)
WORLD = 4


def deferred(sizes: Sizes) -> nn.Module:
    with seeded_init(0):
        return fsdp_core.fully_shard(deferred_init(Decoder, sizes), units=[Block], wire="gloo_p2p")


def materialised(sizes: Sizes) -> nn.Module:
    with seeded_init(0):
        model = deferred_init(Decoder, sizes)
    return fsdp_core.fully_shard(materialize(model), units=[Block], wire="gloo_p2p")


def each_builds_all(sizes: Sizes) -> nn.Module:
    with seeded_init(0):
        model = Decoder(sizes)
    return fsdp_core.fully_shard(model, units=[Block], wire="gloo_p2p")


def from_rank_0(sizes: Sizes) -> nn.Module:
    """Every rank has a whole model, with values of its own; those of rank 0 are sent."""
    with seeded_init(dist.get_rank()):
        model = Decoder(sizes)
    return fsdp_core.fully_shard(model, units=[Block], wire="gloo_p2p", sync_module_states=True)


def deferred_from_rank_0(sizes: Sizes) -> nn.Module:
    """Nobody has a whole model; each parameter is made everywhere and replaced by rank 0's."""
    with seeded_init(dist.get_rank()):
        model = deferred_init(Decoder, sizes)
    return fsdp_core.fully_shard(model, units=[Block], wire="gloo_p2p", sync_module_states=True)


WAYS: dict[str, tuple[Callable[[Sizes], nn.Module], str]] = {
    "deferred": (deferred, "shards + the largest parameter"),
    "deferred, values of rank 0": (deferred_from_rank_0, "shards + the largest parameter"),
    "materialised, then sharded": (materialised, "model, then shards unit by unit"),
    "each rank builds all": (each_builds_all, "model, then shards unit by unit"),
    "built, values of rank 0 sent": (from_rank_0, "model, then shards unit by unit"),
}


def measure(rank: int, way: str, sizes: Sizes) -> tuple[float, int, int, int]:
    """Seconds, peak and rest of resident memory over before, bytes of parameters."""
    settle()
    before = resident_bytes()
    forget_peak()
    dist.barrier()
    started = time.perf_counter()
    model = WAYS[way][0](sizes)
    dist.barrier()
    seconds = time.perf_counter() - started
    peak = peak_bytes() - before
    nbytes = 4 * fsdp_core.describe(model).num_parameters
    return seconds, peak, resident_bytes() - before, nbytes


def run(pool: Pool, small: bool) -> Answer:
    sizes = Sizes(2, 64, 256) if small else Sizes(12, 512, 8192)
    rounds = 1 if small else 3
    found: dict[str, list[tuple[float, int, int, int]]] = {way: [] for way in WAYS}
    ranks = Ranks(WORLD)
    try:
        for way in WAYS:
            ranks.run(measure, way, Sizes(1, 32, 64))  # what a first time imports
        for turn in range(rounds):
            for way in [*list(WAYS)[turn:], *list(WAYS)[:turn]]:
                each = ranks.run(measure, way, sizes)
                slowest, most = max(one[0] for one in each), max(one[1] for one in each)
                found[way].append((slowest, most, max(one[2] for one in each), each[0][3]))
    finally:
        ranks.close()
    rows = []
    base = [one[0] for one in found["deferred"]]
    for way, values in found.items():
        seconds, peak, rest, model = ([one[i] for one in values] for i in range(4))
        ratio = statistics.median(mine / other for mine, other in zip(seconds, base, strict=True))
        of_model = [f"{statistics.median(part) / model[0]:.2f}" for part in (peak, rest)]
        rows.append((way, f"{statistics.median(seconds):.2f}", f"{ratio:.2f}", *of_model, WAYS[way][1]))
    nbytes = found["deferred"][0][3]
    header = ("way", "seconds", "time over deferred", "peak / model", "afterwards / model", "what the way needs")
    return Answer(
        STATEMENT,
        f"{WORLD} ranks of one thread at once, F = {WORLD}, a decoder of {nbytes // 4:,} parameters ({nbytes / 1e6:.0f}"
        f" MB), fp32, {rounds} rounds in turn, medians; memory: resident, per rank, over that before the model, "
        "largest rank.",
        [Table("Initialisation", header, rows)],
        {"measured": found, "model_bytes": nbytes},
    )
