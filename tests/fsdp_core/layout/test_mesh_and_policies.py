"""Rank tables, unit policies, prefetch order, all without tensors on the move."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fsdp_core.errors import WrapError
from fsdp_core.layout.mesh import build_rank_table
from fsdp_core.layout.unit_policy import (
    GroupPolicy,
    ModuleClassPolicy,
    ModuleFacts,
    PredicatePolicy,
    SizePolicy,
    as_policy,
    regroup_by_order,
)
from fsdp_core.runtime.prefetch import ForwardOrder, ForwardPrediction


def test_rows_shard_and_columns_replicate() -> None:
    table = build_rank_table(range(8), 4)
    assert table.rows == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert table.columns == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert table.shard_group(5) == (4, 5, 6, 7) and table.replicate_group(5) == (1, 5)
    assert build_rank_table([3, 5, 9], None).rows == ((3, 5, 9),)
    assert build_rank_table([3, 5, 9], 1).columns == ((3, 5, 9),)


@pytest.mark.parametrize("factor", [0, 3, 16, -1, 2.0])
def test_a_factor_that_does_not_divide_is_refused(factor: Any) -> None:
    with pytest.raises(WrapError, match=r"one of \[1, 2, 4, 8\]"):
        build_rank_table(range(8), factor)


def _facts(model: nn.Module) -> list[ModuleFacts]:
    return [
        ModuleFacts(
            name,
            module,
            sum(p.numel() for p in module._parameters.values() if p is not None),
            sum(p.numel() for p in module.parameters()),
        )
        for name, module in model.named_modules()
    ]


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)), nn.Linear(2, 2))


def _names(model: nn.Module, groups: list[tuple[Any, ...]]) -> list[tuple[str, ...]]:
    names = {module: name for name, module in model.named_modules()}
    return [tuple(names[module] for module in group) for group in groups]


def test_policies_choose_by_class_predicate_size_and_hand() -> None:
    model = _model()
    facts = _facts(model)
    assert _names(model, ModuleClassPolicy((nn.Linear,)).choose(facts)) == [("0",), ("1.0",), ("1.2",), ("2",)]
    assert _names(model, ModuleClassPolicy(("Sequential",)).choose(facts)) == [("1",)]
    assert _names(model, PredicatePolicy(lambda fqn, m: fqn.endswith("2")).choose(facts)) == [("1.2",), ("2",)]
    assert _names(model, SizePolicy(20).choose(facts)) == [("1",)]
    assert _names(model, SizePolicy(10).choose(facts)) == [("1.0",), ("1.2",)]
    assert _names(model, GroupPolicy(((model[0], model[2]),)).choose(facts)) == [("0", "2")]
    with pytest.raises(WrapError, match="LInear"):
        ModuleClassPolicy(("LInear",)).choose(facts)


def test_every_form_of_units_is_understood() -> None:
    model = _model()
    assert as_policy(None) is None and as_policy([]) is None
    assert as_policy(nn.Linear) == ModuleClassPolicy((nn.Linear,))
    assert as_policy(["Linear", nn.ReLU]) == ModuleClassPolicy(("Linear", nn.ReLU))
    assert as_policy(1000) == SizePolicy(1000)
    assert isinstance(as_policy(lambda fqn, module: True), PredicatePolicy)
    assert as_policy([model[0], (model[1], model[2])]) == GroupPolicy(((model[0],), (model[1], model[2])))
    with pytest.raises(WrapError, match="boolean"):
        as_policy(True)
    with pytest.raises(WrapError, match="not understood"):
        as_policy(object())


def test_small_units_regroup_by_observed_order() -> None:
    a, b, c, d = (nn.Linear(1, 1) for _ in range(4))
    assert regroup_by_order([(a, 3), (c, 3), (b, 9), (d, 1)], 6).groups == ((a, c), (b,), (d,))


def test_backward_order_is_the_recorded_forward_reversed() -> None:
    order = ForwardOrder()
    for unit in (0, 3, 1, 2):
        order.record(unit)
    assert [order.before(unit) for unit in (2, 1, 3, 0, 7)] == [1, 3, 0, None, None]


def test_a_unit_called_twice_is_prefetched_for_its_last_call_only() -> None:
    order = ForwardOrder()
    for unit in (0, 1, 2, 1, 3):
        order.record(unit)
    assert order.before(3) == 1
    assert order.before(1) == 2
    assert order.before(2) == 0


def test_forward_prediction_stops_when_the_order_changes() -> None:
    prediction = ForwardPrediction([0, 1, 2, 3])
    assert [prediction.after(unit) for unit in (0, 1, 3, 2)] == [1, 2, None, None]
    assert ForwardPrediction([]).after(0) is None
