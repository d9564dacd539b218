"""The cluster that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import testbed
from tests.slurm.testbed import Testbed


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """A real SLURM of two nodes, started once; where it cannot be, the test is skipped and says why."""
    why = testbed.missing()
    if why is not None:
        pytest.skip(f"no SLURM here: {why}")
    cluster = Testbed(Path(tmp_path_factory.mktemp("slurm")) / "cluster")
    yield cluster
    cluster.stop()
