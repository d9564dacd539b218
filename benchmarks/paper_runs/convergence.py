"""Does sharded training learn what unsharded training learns? AdamW and LAMB on real text, with held-out perplexity."""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core.optimizers import LAMB
from paper_runs.answer import Answer, Chart, Table
from paper_runs.decoder import Block, Sizes, build
from paper_runs.optimizers import OnPieces, PlainLAMB
from paper_runs.ranks import Pool
from recipes.data.stdlib_text import StdlibCorpus

STATEMENT = (
    "Section 5 has throughput and memory only: no loss, no perplexity, no curve of FSDP beside unsharded training, "
    "although section 7.2.1 expects differences of optimizers such as LAMB."
)
WORLD = 4
RATES = {"AdamW": 2e-3, "LAMB": 1e-2}


@dataclass(frozen=True)
class Job:
    """factor: 0 is plain torch, one process, the whole batch at once. pieces: LAMB's norms of each rank's piece."""

    optimizer: str
    factor: int = 0
    order: int = 0  # which order of the samples
    pieces: bool = False

    @property
    def name(self) -> str:
        how = f"F = {self.factor}" if self.factor else "unsharded"
        return (
            f"{self.optimizer}, {how}"
            + (", norms of pieces" if self.pieces else "")
            + (f", other order {self.order}" if self.order else "")
        )


@dataclass(frozen=True)
class Text:
    """Bytes of the standard library's sources. train, held_out: [N] int64; every twentieth document is held out."""

    train: Tensor
    held_out: Tensor

    def batch(self, sizes: Sizes, step: int, order: int) -> Tensor:
        """The whole batch of a step, the same for every way to train: [W B, S + 1]."""
        generator = torch.Generator().manual_seed(1000 * order + step)
        starts = torch.randint(len(self.train) - sizes.seq_len - 1, (WORLD * sizes.batch,), generator=generator)
        return torch.stack([self.train[start : start + sizes.seq_len + 1] for start in starts.tolist()])

    def held_out_batch(self, sizes: Sizes, count: int) -> Tensor:
        width = sizes.seq_len + 1
        every = (len(self.held_out) - width) // count
        return torch.stack([self.held_out[i * every : i * every + width] for i in range(count)])


def read_text(nbytes: int) -> Text:
    parts: dict[bool, bytearray] = {True: bytearray(), False: bytearray()}
    for number, document in enumerate(StdlibCorpus(Path(sysconfig.get_path("stdlib"))).documents()):
        parts[number % 20 == 0] += document.text.encode()
        if len(parts[False]) >= nbytes and len(parts[True]) >= nbytes // 40:
            break
    return Text(*(torch.frombuffer(parts[is_held], dtype=torch.uint8).long() for is_held in (False, True)))


_texts: dict[int, Text] = {}  # of this rank


def _optimizer(job: Job, model: nn.Module) -> Any:
    rate = RATES[job.optimizer]
    if job.pieces:
        return OnPieces(lambda p: PlainLAMB(p, rate), model)
    parameters = fsdp_core.flat_parameters(model) if job.factor else model.parameters()
    if job.optimizer == "AdamW":
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.1, fused=True)
    return LAMB(parameters, rate, weight_decay=0.01) if job.factor else PlainLAMB(parameters, rate)


def train(rank: int, job: Job, sizes: Sizes, steps: int, every: int, nbytes: int) -> list[tuple[int, float]]:
    """(steps done, held-out nats per byte)."""
    text = _texts.setdefault(nbytes, read_text(nbytes))
    held_out = text.held_out_batch(sizes, 8 * WORLD)
    model: nn.Module = build(sizes)
    if job.factor:
        model = fsdp_core.fully_shard(model, units=[Block], sharding_factor=job.factor)
    optimizer = _optimizer(job, model)
    found = []
    for step in range(steps + 1):
        if step % every == 0:
            with torch.no_grad():
                found.append((step, float(model(held_out))))
        if step == steps:
            break
        batch = text.batch(sizes, step, job.order)
        model(batch[rank::WORLD] if job.factor else batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def run(pool: Pool, small: bool) -> Answer:
    sizes = Sizes(layers=1, width=32, vocab=256, batch=1, seq_len=16) if small else Sizes(4, 128, 256, 4, 128)
    steps, every, nbytes = (4, 2, 50_000) if small else (100, 10, 4_000_000)
    plain = [Job(optimizer, order=order) for order in (0, 1) for optimizer in ("AdamW", "LAMB")]
    sharded = [Job("AdamW", 4), Job("LAMB", 4), Job("LAMB", 4, pieces=True)]
    if not small:
        sharded[1:1], sharded[3:3] = [Job("AdamW", 2)], [Job("LAMB", 2)]
    ranks = pool(WORLD)
    together = ranks.run_each(train, [(job, sizes, steps, every, nbytes) for job in plain], limit_s=900)
    curves = {job.name: curve for job, curve in zip(plain, together, strict=True)}
    for job in sharded:
        curves[job.name] = ranks.run(train, job, sizes, steps, every, nbytes, limit_s=900)[0]
    rows = []
    for job in [*plain, *sharded]:
        nats = curves[job.name][-1][1]
        reference = curves[Job(job.optimizer).name]
        apart = max(abs(mine - other) for (_, mine), (_, other) in zip(curves[job.name], reference, strict=True))
        distance = f"{apart:.1e}" if job.factor or job.order else "-"
        rows.append((job.name, f"{nats:.5f}", f"{math.exp(nats):.4f}", distance))
    lines = {name: curve for name, curve in curves.items() if "order" not in name and "F = 2" not in name}
    return Answer(
        STATEMENT,
        f"{steps} steps of {WORLD * sizes.batch} x {sizes.seq_len} bytes of Python's standard library, vocabulary of "
        f"bytes, {sizes}, fp32, learning rates {RATES}; sharded: {WORLD} ranks, each a quarter of the same batch. "
        "Unsharded: one process, torch.optim.AdamW and a LAMB written from its paper. Held out: every twentieth "
        f"file, {8 * WORLD * sizes.seq_len} bytes looked at every {every} steps. 'Other order': the yardstick, "
        "unsharded training on other samples of the same text.",
        [Table("Held out", ("", "nats per byte", "perplexity per byte", "largest distance to unsharded, nats"), rows)],
        {"curves": curves},
        Chart("Held-out loss", "steps", "nats per byte", lines),
    )
