"""Embedding tables that stay sharded: each rank keeps its rows and answers for them.

T tables, B samples of this rank, d embedding width, R_t rows of table t, W ranks.

| tensor | shape and dtype | where, when |
|---|---|---|
| ``weight`` | [slots of this rank, d], the tables' dtype | always; the rows that ``Placement`` gives this rank |
| ids | [B, T] int64 | the batch: one id per table and sample |
| rows on the wire | [distinct rows, d], the narrower of the tables' and the output dtype | in forward |
| output | [B, T, d], dtype of the caller | in forward |
| gradients on the wire | [distinct rows, d], output dtype | in backward; repeated ids are summed first, in float32 |
| ``weight.grad`` | sparse COO, float32 | from backward to the optimizer's ``zero_grad``; on the owner alone |

This is the first of the two ways to place a model too large for a device: what moves are activations, not parameters,
so the sharding engine must leave these tables alone (``ignored_modules``). Consequences, on purpose:

* Gradients *sum* over ranks and micro-batches, on the owner. That is the gradient of the global mean when each
  micro-batch's loss is divided by the global number of samples, as the training loop does. ``no_sync`` has no meaning
  here: there is nothing left to synchronise.
* Gradient clipping does not see the tables: they are in no flat parameter, so neither the norm nor the scaling
  includes them. Row-wise Adagrad normalises each row's step on its own.
* No rank ever holds a whole table (W > 1), not while it is built either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recipes.models.dhen.exchange import Route, deliver, expected_route, give_back, plan_route, world
from recipes.models.dhen.placement import Placement
from recipes.models.dhen.row_init import fill_embedding_rows
from recipes.models.own_shards import OwnShards, TableShard


@dataclass(frozen=True)
class _Index:
    """``Placement`` as tensors on one device. [T] each, but ``first_slots`` [W * T], by rank."""

    rows: Tensor
    block_rows: Tensor
    tables: Tensor
    first_slots: Tensor


class EmbeddingTables(OwnShards):
    """Tables of rows [R_t, dim], one lookup per table: ids [B, T] -> [B, T, dim]. Every rank must call it together.

    Args:
        table_rows: R_t of each table.
        dim: width of a row.
        dtype: of the rows; updates are computed in float32.
        seed: of the initial rows, the same on all ranks; which rank holds a row does not change it.
        placement: null: over all ranks of the default process group, or this process alone.
    """

    def __init__(
        self, table_rows: tuple[int, ...], dim: int, dtype: torch.dtype, seed: int, placement: Placement | None = None
    ) -> None:
        super().__init__()
        rank, world_size = world()
        self.placement = placement or Placement(tuple(table_rows), world_size, rank)
        self.dim, self.seed = dim, seed
        self.weight = nn.Parameter(torch.empty(self.placement.num_slots, dim, dtype=dtype))
        self._index: _Index | None = None
        self.reset_parameters()

    @property
    def num_rows(self) -> int:
        """Rows of all tables on all ranks."""
        return sum(self.placement.table_rows)

    def reset_parameters(self) -> None:
        """The initial rows again (after ``to_empty``, say)."""
        p = self.placement
        with torch.no_grad():
            fill_embedding_rows(self.weight, self.seed, list(p.table_rows), p.world_size, p.rank)

    def forward(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Rows of ``ids`` [B, T] as [B, T, dim] in ``dtype`` (null: the tables' own).

        Raises IndexError, on every rank, if an id of any rank lies outside its table (on CUDA with W = 1 the device
        asserts instead: finding out first would cost a host sync).
        """
        if ids.shape[1] != len(self.placement.table_rows):
            raise ValueError(f"ids of {ids.shape[1]} tables; the model has {len(self.placement.table_rows)}")
        if self.weight.grad_dtype is not torch.float32:
            self.weight.grad_dtype = torch.float32  # gradients of a mean over many samples underflow in float16
        out: Tensor = _Lookup.apply(self.weight, self, ids, dtype or self.weight.dtype)
        return out

    def shards(self) -> list[TableShard]:
        """This rank's part of each table, views of ``weight``."""
        return self._shards_of(self.weight.detach())

    def shards_like(self, per_row: Tensor) -> list[TableShard]:
        """The same for optimizer state with one entry per slot, [slots, ...]."""
        return self._shards_of(per_row)

    def _shards_of(self, local: Tensor) -> list[TableShard]:
        first_slots, shards = self.placement.first_slots(self.placement.rank), []
        for table, rows in enumerate(self.placement.table_rows):
            start, stop = self.placement.span(table, self.placement.rank)
            values = local[first_slots[table] : first_slots[table + 1]]
            shards.append(TableShard(f"table_{table}", (rows, *local.shape[1:]), start, stop, values))
        return shards

    def index_on(self, device: torch.device) -> _Index:
        """Made at the first forward on a device: metadata, not state, so no buffer that init or checkpoints see."""
        if self._index is None or self._index.rows.device != device:
            p = self.placement
            tables = range(len(p.table_rows))
            blocks = [p.block_rows(table) for table in tables]
            first = [slot for rank in range(p.world_size) for slot in p.first_slots(rank)[:-1]]
            self._index = _Index(
                *(torch.tensor(x, dtype=torch.int64, device=device) for x in (p.table_rows, blocks, tables, first))
            )
        return self._index

    def extra_repr(self) -> str:
        p = self.placement
        return f"{len(p.table_rows)} tables, {self.num_rows} rows, dim={self.dim}, rank {p.rank} of {p.world_size}"


class _Lookup(torch.autograd.Function):
    """Rows of the tables; in backward, their gradients to the owners as a sparse gradient of the local rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tables: EmbeddingTables, ids: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.weight_shape, ctx.route = weight.shape, None
        out_shape = (*ids.shape, tables.dim)
        world_size = tables.placement.world_size
        if ids.is_meta:
            return _lookup_on_paper(ctx, weight, ids, dtype, out_shape, world_size)
        index = tables.index_on(ids.device)
        is_valid = ((ids >= 0) & (ids < index.rows)).all()
        block = torch.div(ids, index.block_rows, rounding_mode="floor")
        owner = (block + index.tables) % world_size
        slot = index.first_slots[owner * len(index.rows) + index.tables] + ids - block * index.block_rows
        if world_size == 1:
            if ids.device.type == "cpu" and not is_valid:
                raise _outside(ids, tables.placement)
            ctx.slots = slot.flatten()
            return F.embedding(slot, weight).to(dtype)
        # An id outside its table is routed as id 0 until every rank has heard of it.
        owner, slot = (torch.where(is_valid, x, torch.zeros_like(x)).flatten() for x in (owner, slot))
        ctx.route = plan_route(owner, slot, tables.placement.most_slots, world_size, is_valid)
        if ctx.route is None:
            raise _outside(ids, tables.placement)
        rows = weight[ctx.route.slots].to(_narrower(weight.dtype, dtype))
        return deliver(ctx.route, rows)[ctx.route.position].to(dtype).view(out_shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        rows = grad.reshape(-1, grad.shape[-1])
        route: Route | None = ctx.route
        if route is None:
            return _sparse(ctx.slots, rows, ctx.weight_shape), None, None, None
        summed = rows.new_zeros(sum(route.num_sent), rows.shape[1], dtype=torch.float32)
        summed.index_add_(0, route.position, rows.float())
        return _sparse(route.slots, give_back(route, summed.to(grad.dtype)), ctx.weight_shape), None, None, None


def _lookup_on_paper(
    ctx: Any, weight: Tensor, ids: Tensor, dtype: torch.dtype, out_shape: tuple[int, ...], world_size: int
) -> Tensor:
    """The lookup of a plan: which rows are wanted is not known, how many is."""
    if world_size == 1:
        ctx.slots = ids.flatten()
        return F.embedding(ids, weight).to(dtype)
    ctx.route = expected_route(ids.numel(), world_size, ids.device)
    rows = weight[ctx.route.slots].to(_narrower(weight.dtype, dtype))
    return deliver(ctx.route, rows)[ctx.route.position].to(dtype).view(out_shape)


def _sparse(slots: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """Checking the indices would cost a host sync; they come from ``Placement``."""
    return torch.sparse_coo_tensor(slots[None], rows.float(), shape, check_invariants=False)


def _narrower(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """What to send: converting before or after the wire gives the same numbers, so send the smaller."""
    return a if a.itemsize < b.itemsize else b


def _outside(ids: Tensor, placement: Placement) -> IndexError:
    """Names the first offending id of this rank, if the offence was here."""
    for table, rows in enumerate(placement.table_rows):
        wrong = ids[:, table][(ids[:, table] < 0) | (ids[:, table] >= rows)]
        if wrong.numel():
            return IndexError(f"embedding table {table} has {rows} rows; the batch asks for row {int(wrong[0])}")
    return IndexError("another rank's batch asks for a row outside its embedding table; its log names it")
