"""Whatever the tree, the units, the settings and the accumulation: sharded training is plain training."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fsdp_core.properties.examples import Example, examples
from tests.fsdp_core.properties.run import check_example
from tests.support.ranks import Pools

# The same examples on every run. A failure is printed as found: making it smaller would restart ranks for each try.
ALWAYS = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "phases": (Phase.explicit, Phase.generate),
    "suppress_health_check": list(HealthCheck),
}


@given(example=examples(2))
@settings(max_examples=50, **ALWAYS)
def test_two_ranks_train_like_one(ranks: Pools, example: Example) -> None:
    ranks(2).run(check_example, example)


@given(example=examples(4))
@settings(max_examples=12, **ALWAYS)
def test_four_ranks_train_like_one(ranks: Pools, example: Example) -> None:
    ranks(4).run(check_example, example)


@pytest.mark.full
@pytest.mark.timeout(5400)
@given(example=examples(2))
@settings(max_examples=1500, **ALWAYS)
def test_two_ranks_train_like_one_at_length(ranks: Pools, example: Example) -> None:
    ranks(2).run(check_example, example)


@pytest.mark.full
@pytest.mark.timeout(5400)
@given(example=examples(4))
@settings(max_examples=400, **ALWAYS)
def test_four_ranks_train_like_one_at_length(ranks: Pools, example: Example) -> None:
    ranks(4).run(check_example, example)
