"""The engine's ledger beside what the process really holds: a model large enough that the allocator is no excuse."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import fsdp_core
from fsdp_core import deferred_init, seeded_init
from fsdp_core.runtime.find import contexts_in
from paper_runs.answer import Answer, Table, mb
from paper_runs.decoder import Block, Decoder, Sizes, random_batches
from paper_runs.memory_probe import forget_peak, peak_bytes, resident_bytes, settle
from paper_runs.ranks import Pool, Ranks

STATEMENT = (
    "Section 3.2.1: peak parameter memory of a rank is the shards and the largest units in flight. Only totals of the "
    "allocator were shown (figure 8), which activations and fragments are part of."
)
HUNDRED_MILLION = Sizes(layers=8, width=1024, vocab=256, batch=1, seq_len=16)  # 101 million parameters, 405 MB


@dataclass(frozen=True)
class Held:
    """Bytes of one rank in the third step.

    ledger: shards, gradients and the engine's buffers at their peak. scratch: of the wire, for what peers send.
    optimizer: its state. process: the most resident memory over that before the model.
    """

    ledger: int
    scratch: int
    optimizer: int
    process: int

    @property
    def ratio(self) -> float:
        return self.process / self.together

    @property
    def together(self) -> int:
        return self.ledger + self.scratch + self.optimizer


def held(rank: int, sizes: Sizes, reshard: bool, factor: int, kind: str) -> Held:
    settle()
    before = resident_bytes()
    with seeded_init(0):
        model = fsdp_core.fully_shard(
            deferred_init(Decoder, sizes),
            units=[Block],
            sharding_factor=factor,
            reshard_after_forward=reshard,
            gather_buffers="allocator",
            wire="gloo_p2p",
        )
    flats = fsdp_core.flat_parameters(model)
    optimizer: torch.optim.Optimizer
    if kind == "SGD":
        optimizer = torch.optim.SGD(flats, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(flats, lr=1e-4, fused=True)
    batch = random_batches(sizes, rank, 1)[0]
    (context,) = contexts_in(model)
    pool = context.resources.pool
    for step in range(3):
        if step == 2:
            resident_bytes()
            forget_peak()
            pool.peak_live_bytes = pool.live_bytes
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    process = peak_bytes() - before
    states = [value for state in optimizer.state.values() for value in state.values()]
    shards = sum(handle.sharded.nbytes for _, handle in context.each_handle())
    scratch = context.root.groups.shard.scratch_bytes
    return Held(2 * shards + pool.peak_live_bytes, scratch, sum(value.nbytes for value in states), process)


def measure(ranks: Ranks, sizes: Sizes) -> dict[str, Held]:
    """The rank that is farthest off, by setting."""
    ranks.run(held, Sizes(layers=2, width=128, batch=1, seq_len=16), True, ranks.world_size, "AdamW")  # warm
    found = {}
    for kind in ("SGD", "AdamW"):
        for name, reshard in (("RAF", True), ("NRAF", False)):
            each = ranks.run(held, sizes, reshard, ranks.world_size, kind)
            found[f"{name}, {kind}"] = max(each, key=lambda one: abs(one.ratio - 1))
    return found


def run(pool: Pool, small: bool) -> Answer:
    sizes = Sizes(layers=2, width=64, batch=1, seq_len=16) if small else HUNDRED_MILLION
    ranks = Ranks(2)
    try:
        found = measure(ranks, sizes)
    finally:
        ranks.close()
    kinds = ("ledger", "scratch", "optimizer", "together", "process")
    rows = [(name, *(mb(getattr(one, kind)) for kind in kinds), f"{one.ratio:.3f}") for name, one in found.items()]
    header = ("MB", "ledger", "wire's scratch", "optimizer state", "together", "process", "process / together")
    return Answer(
        STATEMENT,
        f"2 ranks, F = 2, gloo_p2p, fp32, a unit per block, {sizes}, gathered buffers from the allocator, deferred "
        "initialisation. Ledger: shards, gradients and the engine's buffers at their peak in the third step; "
        "scratch: what the wire keeps for slices that peers send. Process: the peak of resident memory in that step "
        "over what was resident before the model (VmHWM), with an allocator that gives back at once; activations and "
        "the gradient of one parameter on its way are in it and not in the others. The rank farthest off.",
        [Table("One rank", header, rows)],
        {name: {**vars(one), "ratio": one.ratio} for name, one in found.items()},
    )
