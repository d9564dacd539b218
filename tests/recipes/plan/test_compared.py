"""A plan beside a run, as people, tables and files are told of it; and what is compared with what."""

from __future__ import annotations

import pytest

from launcher.sweep import table
from recipes.plan.compared import Beside, Compared, columns_of, markdown_of
from recipes.plan.record import GivenUp, record_run
from tests.recipes.plan.configs_in_tests import tiny

FOUND = Beside(
    (
        Compared("step_s", 0.2, 0.25),
        Compared("engine_bytes", 100 * 2**20, 100 * 2**20),
        Compared("allocated_bytes", 4 * 2**30, 5 * 2**30),
        Compared("sent_bytes", 0, 512 * 2**10),
    ),
    ("something could not be compared",),
)


def test_people_are_told_both_numbers_and_how_far_apart_they_are() -> None:
    assert list(FOUND.lines()) == [
        ("planned: step", "200 ms, was 250 ms (1.25 x)"),
        ("planned: allocated", "4.00 GiB, was 5.00 GiB (1.25 x)"),
        ("planned: engine's memory", "100 MiB, was 100 MiB (1.00 x)"),
        ("planned: sent in a step", "0 KiB, was 512 KiB"),
        ("plan", "something could not be compared"),
    ]
    assert "| step_s | 0.2 | 0.25 | 1.250 |" in markdown_of(FOUND.as_json())
    assert "| sent_bytes | 0 | 524288 |  |" in markdown_of(FOUND.as_json())


def test_a_sweeps_table_has_one_memory_the_most_telling() -> None:
    columns = columns_of(FOUND.as_json())
    assert columns == {
        "plan_step_s": 0.2,
        "step_over_plan": 1.25,
        "plan_memory_bytes": 4 * 2**30,
        "memory_over_plan": 1.25,
        "plan_sent_bytes": 0,
    }
    assert columns_of(Beside().as_json()) == columns_of({}) == {}
    assert table.readable("plan_memory_bytes", columns["plan_memory_bytes"]) == "4.00 GiB"
    assert table.readable("step_over_plan", columns["step_over_plan"]) == "1.25"


def test_what_the_engine_holds_is_shards_gradients_and_the_window() -> None:
    """Full sharding of a root and two blocks: two units gathered at most beside the root, a gradient on its way."""
    recorded = record_run(tiny("gpt", sharding__wire="collectives"), 4, 4, is_inline=True)
    flats = [flat for unit in recorded.report.units for flat in unit.flat_parameters]
    shards = 4 * sum(flat.shard_numel for flat in flats)
    root, block = 4 * flats[0].padded_numel, 4 * flats[-1].padded_numel
    assert (recorded.held.shards, recorded.held.gradients) == (shards, shards)
    assert 2 * shards + root + block < recorded.held.peak <= 2 * shards + 2 * root + 4 * block


def test_a_recording_is_given_up_when_nobody_waits_for_it() -> None:
    asked = []

    def why_not() -> str:
        asked.append(1)
        return "no time" if len(asked) == 3 else ""

    with pytest.raises(GivenUp, match="no time"):
        record_run(tiny("gpt"), 2, 2, why_not=why_not)
    assert len(asked) == 3
