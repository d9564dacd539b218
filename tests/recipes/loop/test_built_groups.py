"""What was built is printed, and compared with what was asked for."""

from __future__ import annotations

import dataclasses

import pytest

from fsdp_core.describe import FlatParameterReport, GroupReport, ModelReport, UnitReport
from recipes.built_groups import checked, group_text
from recipes.context import RankContext
from recipes.schema.engine import PrecisionConfig, ShardingConfig

FLAT = FlatParameterReport(10, 12, 6, "float32", "float32", "float32", 2, 2)
UNITS = (UnitReport(0, "<root>", ("GPT",), True, (FLAT,)), UnitReport(1, "block", ("Block",), True, (FLAT,)))
GROUPS = GroupReport(4, 2, ((0, 1), (2, 3)), ((0, 2), (1, 3)), 0, "shared_memory", "gloo_p2p", ("a word",))
REPORT = ModelReport((GROUPS,), UNITS, 20, 48, 40, 40, ())
CONTEXT = RankContext(0, 4, 0, 4, 0, 1, ("h",) * 4, "cpu", None)  # type: ignore[arg-type]


def test_the_lines_name_groups_units_wires_and_dtypes():
    lines = checked(REPORT, ShardingConfig(factor=2), PrecisionConfig(), CONTEXT).lines()
    text = "\n".join(lines)
    for part in (
        "F=2 of W=4, RAF",
        "1 Block, root",
        "[0 1] [2 3] by shared_memory",
        "[0 2] [1 3] by gloo_p2p",
        "a word",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("sharding", "precision", "what"),
    [
        (ShardingConfig(), PrecisionConfig(), "sharding factor: expected 4, got 2"),
        (ShardingConfig(factor=2, reshard_after_forward=False), PrecisionConfig(), "reshard after forward"),
        (ShardingConfig(factor=2), PrecisionConfig(param_dtype="bfloat16"), "compute dtype"),
    ],
)
def test_a_contradiction_stops_the_run(sharding: ShardingConfig, precision: PrecisionConfig, what: str):
    with pytest.raises(RuntimeError, match=what):
        checked(REPORT, sharding, precision, CONTEXT)


def test_other_groups_than_asked_for_are_named():
    wrong = dataclasses.replace(GROUPS, shard_groups=((0, 2), (1, 3)))
    with pytest.raises(RuntimeError, match="sharding groups"):
        checked(dataclasses.replace(REPORT, groups=(wrong,)), ShardingConfig(factor=2), PrecisionConfig(), CONTEXT)


def test_long_tables_are_cut():
    assert group_text([list(range(512))]) == "[0 1 2 3 4 5 6 7 ... 511]"
    assert group_text([[rank] for rank in range(100)]).endswith("[7] ... (100 groups)")
