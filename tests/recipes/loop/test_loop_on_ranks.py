"""The loop on two ranks: the same numbers as alone, the same decisions on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.metrics.ledger import Line
from tests.recipes.loop.recipes_in_tests import gathers_of, lines_of, many_lines, ranks_at_work, small_recipe
from tests.support.ranks import Pools

KINDS = ("gpt", "t5", "dhen")


def test_sums_maxima_and_gathers_over_ranks(ranks: Pools):
    expected = {"sum": [2.0, 1.0], "max": [5, 1], "gather": [[0, 7], [1, 7]]}
    assert ranks(2).run(ranks_at_work) == [expected, expected]


def test_accumulation_with_and_without_communication_equals_one_process(ranks: Pools):
    configs = [
        small_recipe(kind, train__steps=4, train__micro_batch=2, train__accumulate_with_communication=communicates)
        for kind in KINDS
        for communicates in (False, True)
    ]
    per_rank = ranks(2).run(many_lines, configs)
    alone = [lines_of(None, small_recipe(kind, train__steps=4)) for kind in KINDS for _ in range(2)]
    for ours, expected in zip(per_rank[0], alone, strict=True):
        assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in expected], rel=1e-5)
        assert [line["grad_norm"] for line in ours] == pytest.approx([line["grad_norm"] for line in expected], rel=1e-4)


def test_evaluation_does_not_depend_on_the_number_of_ranks(ranks: Pools):
    """Ten held-out samples in batches of four: ranks get unequal parts, filled up and not counted."""
    configs = [small_recipe(kind, train__steps=1, train__eval_samples=10) for kind in KINDS]
    per_rank = ranks(2).run(many_lines, configs)
    for number, config in enumerate(configs):
        (_, alone), (_, ours) = lines_of(None, config), per_rank[0][number]
        assert {name for name in alone if name.startswith("eval_")} == set(alone)
        assert ours == pytest.approx(alone, rel=1e-5, nan_ok=True)
        assert per_rank[1][number][1] == ours, "every rank must know the same result"


def test_an_overflow_is_skipped_by_both_ranks_together(ranks: Pools):
    config = small_recipe(
        "gpt",
        precision__param_dtype="float16",
        precision__reduce_dtype="float16",
        precision__grad_scaler=True,
        precision__initial_scale=2.0**26,
        train__steps=12,
    )
    (first,), (second,) = ranks(2).run(many_lines, [config])
    assert decisions(first) == decisions(second)
    scales = [line["loss_scale"] for line in first]
    assert scales[-1] < scales[0]
    assert first[-1]["loss"] < first[0]["loss"]


def decisions(lines: list[Line]) -> list[str]:
    """What ranks must agree on, as text: the norm of an overflow is not a number, which equals nothing."""
    return [repr([line[name] for name in ("step", "loss", "grad_norm", "loss_scale", "lr")]) for line in lines]


def test_deferred_and_eager_building_agree(ranks: Pools):
    configs = [small_recipe("gpt", train__steps=2, sharding__init=init) for init in ("deferred", "eager")]
    deferred, eager = ranks(2).run(many_lines, configs)[0]
    assert [line["loss"] for line in deferred] == [line["loss"] for line in eager]


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("raf", [False, True], ids=["NRAF", "RAF"])
def test_recomputation_gathers_no_unit_more_often(ranks: Pools, tmp_path: Path, is_recomputed: bool, raf: bool):
    """With RAF a block is gathered for forward and for backward; root and last block once, as NRAF does with all."""
    config = small_recipe(
        "gpt",
        model__num_layers=3,
        train__steps=3,  # as many as a trace has by default
        train__activation_checkpointing=is_recomputed,
        sharding__reshard_after_forward=raf,
        sharding__wire="collectives",  # shared memory has nothing to free and gather again
    )
    expected = {"<root>": 1, "blocks.0": 1 + raf, "blocks.1": 1 + raf, "blocks.2": 1}
    for steps in ranks(2).run(gathers_of, config, str(tmp_path)):
        assert steps[-1] == expected
