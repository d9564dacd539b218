"""Lookup, gradient and update of embedding tables on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.models.dhen import RowwiseAdagrad, extra_optimizers, ignored_modules
from recipes.models.dhen.tables import EmbeddingTables
from tests.recipes.models.tiny import DHEN

ROWS = (10, 3, 100)


def make(dtype: torch.dtype = torch.float32) -> EmbeddingTables:
    return EmbeddingTables(ROWS, 8, dtype, seed=3)


def some_ids(num_samples: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(rows, (num_samples,), generator=generator) for rows in ROWS], dim=1)


def dense_weights(tables: EmbeddingTables) -> list[Tensor]:
    return [shard.values.clone().float().requires_grad_() for shard in tables.shards()]


def dense_lookup(weights: list[Tensor], ids: Tensor) -> Tensor:
    return torch.stack([F.embedding(ids[:, table], weight) for table, weight in enumerate(weights)], dim=1)


def test_lookup_and_gradient_equal_plain_embeddings() -> None:
    tables, ids = make(), some_ids(20)
    weights = dense_weights(tables)
    scale = torch.randn(20, 3, 8)
    out, reference = tables(ids), dense_lookup(weights, ids)
    assert torch.equal(out, reference)
    for _ in range(2):  # micro-batches add up
        (tables(ids) * scale).sum().backward()
        (dense_lookup(weights, ids) * scale).sum().backward()
    assert tables.weight.grad.is_sparse
    gradient = tables.weight.grad.to_dense().split(ROWS)
    for table, weight in enumerate(weights):
        torch.testing.assert_close(gradient[table], weight.grad)


@pytest.mark.parametrize("table_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_low_precision_tables_keep_tiny_gradients(table_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
    tables = make(table_dtype)
    out = tables(some_ids(4), compute_dtype)
    assert out.dtype is compute_dtype
    (out * 1e-9).sum().backward()  # far below the smallest float16
    assert tables.weight.grad.dtype is torch.float32
    assert tables.weight.grad.coalesce().values().min() > 0


def test_low_precision_step_is_computed_in_float32_and_rounded_once() -> None:
    tables = make(torch.float16)
    before, ids = tables.weight.detach().float(), some_ids(4)
    optimizer = RowwiseAdagrad([tables.weight], lr=0.05)
    (tables(ids, torch.float32) * 1e-9).sum().backward()
    gradient = tables.weight.grad.to_dense()
    optimizer.step()
    step = 0.05 * gradient / (gradient.square().mean(dim=1, keepdim=True).sqrt() + 1e-8)
    assert torch.equal(tables.weight, (before - step).half())


def test_adagrad_equals_the_formula_over_steps() -> None:
    tables = make()
    weights, lr, eps = dense_weights(tables), 0.1, 1e-8
    sums = [torch.zeros(rows) for rows in ROWS]
    optimizer = RowwiseAdagrad([tables.weight], lr=lr, eps=eps)
    for step in range(4):
        ids = some_ids(12, seed=step)
        tables(ids).square().sum().backward()
        dense_lookup(weights, ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight, total in zip(weights, sums, strict=True):
                total += weight.grad.square().mean(dim=1)
                weight -= lr * weight.grad / (total.sqrt() + eps)[:, None]
                weight.grad = None
    for shard, state, weight, total in zip(
        tables.shards(),
        tables.shards_like(optimizer.accumulator(tables.weight)),
        weights,
        sums,
        strict=True,
    ):
        torch.testing.assert_close(shard.values, weight.detach())
        torch.testing.assert_close(state.values, total)
        assert state.shape == (total.numel(),)


def test_untouched_rows_do_not_move() -> None:
    tables = make()
    before = tables.weight.detach().clone()
    optimizer = RowwiseAdagrad([tables.weight], lr=0.1)
    tables(torch.tensor([[4, 2, 77]])).sum().backward()
    optimizer.step()
    moved = (tables.weight != before).any(dim=1).nonzero().flatten()
    assert moved.tolist() == [4, 10 + 2, 13 + 77]


def test_no_gradient_no_step() -> None:
    tables = make()
    optimizer = RowwiseAdagrad([tables.weight], lr=0.1)
    before = tables.weight.detach().clone()
    optimizer.step()
    tables(torch.empty(0, 3, dtype=torch.int64)).sum().backward()  # a rank without samples
    optimizer.step()
    assert torch.equal(tables.weight, before)


def test_a_dense_gradient_is_refused() -> None:
    tables = make()
    tables.weight.sum().backward()
    with pytest.raises(TypeError, match="wants sparse gradients"):
        RowwiseAdagrad([tables.weight], lr=0.1).step()


def test_frozen_tables_get_no_gradient() -> None:
    tables = make()
    tables.weight.requires_grad_(False)
    assert not tables(some_ids(2)).requires_grad


def test_shards_are_views() -> None:
    tables = make()
    tables.shards()[1].values.zero_()
    assert tables(torch.tensor([[0, 2, 0]]))[0, 1].count_nonzero() == 0


@pytest.mark.parametrize("bad", [-1, 3])
def test_an_id_outside_its_table_is_named(bad: int) -> None:
    with pytest.raises(IndexError, match=f"embedding table 1 has 3 rows; the batch asks for row {bad}"):
        make()(torch.tensor([[0, 2, 0], [0, bad, 0]]))


def test_wrong_number_of_tables() -> None:
    with pytest.raises(ValueError, match="ids of 2 tables; the model has 3"):
        make()(torch.zeros(4, 2, dtype=torch.int64))


def test_gradient_scaler_unscales_and_skips() -> None:
    tables = make()
    optimizer = RowwiseAdagrad([tables.weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(tables(some_ids(2)).sum()).backward()
    scaler.unscale_(optimizer)
    plain = make()
    plain(some_ids(2)).sum().backward()
    torch.testing.assert_close(tables.weight.grad.to_dense(), plain.weight.grad.to_dense())
    optimizer.zero_grad()
    scaler.update()
    before = tables.weight.detach().clone()
    scaler.scale(tables(some_ids(2)).sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert torch.equal(tables.weight, before)


def test_what_the_recipe_asks_for() -> None:
    model = DHEN.build()
    (tables,) = ignored_modules(model)
    (optimizer,) = extra_optimizers(model, DHEN.config)
    assert tables is model.tables
    assert optimizer.param_groups[0]["params"] == [tables.weight]
    assert optimizer.param_groups[0]["lr"] == DHEN.config.table_lr
    assert {name for name, _ in model.named_parameters() if name.startswith("tables")} == {"tables.weight"}
