"""DHEN's dense part against its formulas, and the sizes it refuses."""

from __future__ import annotations

import pytest
import torch

from recipes.data.records import DataInfo
from recipes.models import dhen
from recipes.models.dhen.layers import AdvancedDLRM, DHENLayer, LowRankCross, shares
from tests.recipes.models.tiny import DHEN


def test_pairs_are_each_counted_once() -> None:
    module, x = AdvancedDLRM(num_tokens=4, dim=3, hidden=6, tokens_out=2), torch.randn(5, 4, 3)
    seen: list[torch.Tensor] = []
    module.hidden.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    assert module(x).shape == (5, 2, 3)
    expected = [(x[:, i] * x[:, j]).sum(-1) for i in range(4) for j in range(i)]
    torch.testing.assert_close(seen[0], torch.stack(expected, dim=1))


def test_low_rank_cross_by_hand() -> None:
    module, x = LowRankCross(num_tokens=4, dim=3, rank=2, tokens_out=3), torch.randn(5, 4, 3)
    matrix = module.up.weight @ module.down.weight  # [12, 12] of rank 2
    flat = x.flatten(1)
    crossed = (flat * (flat @ matrix.T + module.up.bias) + flat).view(5, 4, 3)
    expected = torch.einsum("lm,bmd->bld", module.mix.weight, crossed)
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)


def test_layer_is_normalised_ensemble_plus_shortcut() -> None:
    layer, x = DHENLayer(DHEN.config), torch.randn(2, 7, 8)
    joined = torch.cat([module(x) for module in layer.interactions], dim=1)
    assert [module(x).shape[1] for module in layer.interactions] == [4, 3]
    torch.testing.assert_close(layer(x), torch.nn.functional.layer_norm(joined + x, (8,)))


@pytest.mark.parametrize(("total", "parts", "expected"), [(7, 2, [4, 3]), (8, 2, [4, 4]), (5, 3, [2, 2, 1])])
def test_shares(total: int, parts: int, expected: list[int]) -> None:
    assert shares(total, parts) == expected


def test_without_dense_features() -> None:
    info = DataInfo("clicks", num_dense=0, table_rows=(10, 3))
    model = dhen.build(DHEN.config, info)
    assert model.bottom is None
    logits = model(torch.empty(4, 0), torch.zeros(4, 2, dtype=torch.int64))
    assert logits.shape == (4,)
    low = model.to(torch.bfloat16)(torch.empty(4, 0, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.int64))
    assert low.dtype is torch.bfloat16


def test_equal_tables_by_number() -> None:
    model = dhen.build(DHEN.with_config(num_tables=3, rows_per_table=11).config, DataInfo("clicks", num_dense=2))
    assert model.tables.placement.table_rows == (11, 11, 11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules": ["advanced_dlrm", "mlp"]}, "unknown interaction module 'mlp'; known: advanced_dlrm, dcn_low_rank"),
        ({"modules": []}, r"model.modules has 0 entries; it needs 1 to model.num_tokens \(7\)"),
        ({"modules": ["dcn_low_rank"] * 8}, "model.modules has 8 entries"),
        ({"num_dense": 4}, "model.num_dense is 4, but the data has 5"),
        ({"table_rows": [10, 3, 100]}, "3 embedding tables, the data 5 categorical features"),
        ({"table_rows": [10, 3, 99, 1, 7]}, "embedding table 2 has 99 rows, but the data's feature 2 has 100 values"),
        ({"table_rows": [10] * 5, "num_tables": 5, "rows_per_table": 100}, "say the same thing twice"),
        ({"num_tables": 5}, "go together"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_refusals(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DHEN.with_config(**changes).build()


def test_nobody_says_the_sizes() -> None:
    with pytest.raises(ValueError, match=r"model.num_dense is null and the data does not say it"):
        dhen.build(DHEN.config, DataInfo("clicks", table_rows=(3,)))
    with pytest.raises(ValueError, match=r"model.table_rows is null and the data has no categorical features"):
        dhen.build(DHEN.config, DataInfo("clicks", num_dense=3))
