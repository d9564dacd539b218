"""Odd programs beside plain training: the same result, or an error that names what is wrong, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fsdp_core.behaviours.odd_programs import PROGRAMS
from tests.fsdp_core.behaviours.variants import VARIANTS, WIDE, every_variant
from tests.support.ranks import Pools, Rank

OF_ONE_DTYPE = ("autocast", "a_graph_of_parameter_gradients_then_training", "torchs_fast_path_in_evaluation")


def _run(rank: Rank, name: str, options: dict[str, Any]) -> None:
    PROGRAMS[name](rank, options)


@pytest.mark.parametrize("name", PROGRAMS)
@every_variant
def test_odd_programs(ranks: Pools, options: dict[str, Any], name: str) -> None:
    ranks(2).run(_run, name, options)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in OF_ONE_DTYPE])
def test_odd_programs_where_everything_is_cast(ranks: Pools, name: str) -> None:
    ranks(2).run(_run, name, WIDE)


@pytest.mark.full
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("wire", ["collectives", "auto"])
def test_odd_programs_in_two_copies(ranks: Pools, wire: str, name: str) -> None:
    ranks(4).run(_run, name, {**VARIANTS["raf"], "wire": wire, "sharding_factor": 2})
