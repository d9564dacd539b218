"""What the ranks run in ``test_dhen_ranks``: functions that travel by name. ``rank`` is None in a lone process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_core
from recipes.models.dhen import extra_optimizers, ignored_modules
from recipes.models.dhen.exchange import plan_route
from recipes.models.dhen.tables import EmbeddingTables
from recipes.registry import MODELS
from tests.recipes.models.tiny import DHEN
from tests.support.ranks import Rank

ROWS = (10, 3, 100, 1, 7)


@dataclass(frozen=True)
class Part:
    """A table's part on one rank."""

    start: int
    values: Tensor


@dataclass(frozen=True)
class Trained:
    """losses: of every step, over all ranks. tables, sums: this rank's parts of weights and of Adagrad's state."""

    losses: list[float]
    tables: list[Part]
    sums: list[Part]


def own_part(rank: Rank | None, num_samples: int) -> slice:
    if rank is None:
        return slice(0, num_samples)
    each = num_samples // rank.world_size
    return slice(rank.rank * each, (rank.rank + 1) * each)


def parts(shards: list) -> list[Part]:
    return [Part(shard.start, shard.values.clone()) for shard in shards]


def train(rank: Rank | None, table_dtype: str, num_micro_batches: int) -> Trained:
    """Six steps of 16 samples; dense gradients are summed here by hand, the tables see to themselves."""
    tiny = DHEN.with_config(table_dtype=table_dtype)
    model = tiny.build()
    (own,) = extra_optimizers(model, tiny.config)
    (tables,) = ignored_modules(model)
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
    sgd = torch.optim.SGD(dense, lr=0.1)
    losses = []
    for step in range(6):
        batch, total = tiny.batch(16, seed=step), torch.zeros(())
        mine = {name: x[own_part(rank, 16)] for name, x in batch.items()}
        for micro in zip(*(x.chunk(num_micro_batches) for x in mine.values()), strict=True):
            micro_batch = dict(zip(mine, micro, strict=True))
            samples = micro_batch["labels"].numel()
            loss = tiny.loss(model, micro_batch) * (samples / 16)  # of the global mean
            loss.backward()
            total += loss.detach()
        if rank is not None:
            for tensor in (total, *(p.grad for p in dense)):
                dist.all_reduce(tensor)
        losses.append(total.item())
        for optimizer in (sgd, own):
            optimizer.step()
            optimizer.zero_grad()
    return Trained(losses, parts(tables.shards()), parts(tables.shards_like(own.accumulator(tables.weight))))


def uneven_lookup(rank: Rank, table_dtype: str, dtype: str) -> tuple[Tensor, list[Part]]:
    """Rank r brings 3 r samples (the first none); returns its rows and its part of the gradient."""
    tables = EmbeddingTables(ROWS, 8, getattr(torch, table_dtype), seed=3)
    ids = uneven_ids(rank.rank)
    out = tables(ids, getattr(torch, dtype))
    (out.float() * (1.0 + rank.rank)).sum().backward()
    gradient = tables.weight.grad.to_dense()
    return out.detach(), parts(tables.shards_like(gradient))


def uneven_ids(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    columns = [torch.randint(rows, (3 * number,), generator=generator) for rows in ROWS]
    return torch.stack(columns, dim=1)


def outside_then_inside(rank: Rank) -> tuple[str, bool]:
    """The last rank asks for a row that does not exist; the next lookup must work again."""
    tables = EmbeddingTables(ROWS, 8, torch.float32, seed=3)
    ids = torch.zeros(2, len(ROWS), dtype=torch.int64)
    if rank.rank == rank.world_size - 1:
        ids[1, 1] = 3
    try:
        tables(ids)
    except IndexError as error:
        message = str(error)
    return message, tables(torch.zeros_like(ids)).isfinite().all().item()


def route_of_repeats(rank: Rank) -> tuple[int, list[int]]:
    """Everybody wants slot 5 of rank 1 four times and a slot of its own once: rows sent, slots asked of this rank."""
    owner = torch.tensor([1, 1, 0, 1, 1])
    slot = torch.tensor([5, 5, rank.rank, 5, 5])
    route = plan_route(owner, slot, num_slots=10, world_size=rank.world_size, is_valid=torch.tensor(True))
    assert route is not None
    return sum(route.num_sent), route.slots.tolist()


@dataclass(frozen=True)
class Engaged:
    """losses and gradient norms of every step; this rank's part of the tables; what the engine took over."""

    losses: list[float]
    norms: list[float]
    tables: list[Part]
    managed: list[str]


def train_with_engine(rank: Rank | None, factor: int) -> Engaged:
    """Recorded without memory, sharded by the engine, its tables left alone; four clipped steps."""
    with fsdp_core.seeded_init(7):
        model = fsdp_core.deferred_init(MODELS["dhen"].load("build"), DHEN.config, DHEN.info)
    units = MODELS["dhen"].load("unit_classes")()
    fsdp_core.fully_shard(model, units=units, sharding_factor=factor, ignored_modules=ignored_modules(model))
    fsdp_core.set_gradient_divide_factor(model, 1.0)
    (tables,), (own,) = ignored_modules(model), extra_optimizers(model, DHEN.config)
    flat = fsdp_core.flat_parameters(model)
    optimizers = (torch.optim.AdamW(flat, lr=1e-2), own)
    losses, norms = [], []
    for step in range(4):
        batch = DHEN.batch(16, seed=step)
        mine = {name: x[own_part(rank, 16)] for name, x in batch.items()}
        loss = DHEN.loss(model, mine) * (mine["labels"].numel() / 16)
        loss.backward()
        total = loss.detach().clone()
        if rank is not None:
            dist.all_reduce(total)
        losses.append(total.item())
        norms.append(fsdp_core.clip_grad_norm_(model, 0.05).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    managed = [name for name, p in model.named_parameters() if p.shape == tables.weight.shape]
    return Engaged(losses, norms, parts(tables.shards()), managed)
