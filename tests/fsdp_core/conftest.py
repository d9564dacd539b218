"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """Warm ranks: ``ranks(2).run(function, *args)``."""
    pools = Pools()
    yield pools
    pools.close()
