"""What every test shares: the long tests' switch, GPU tests, no silent skips in CI, nothing left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C and hands that down; the programs under test are stopped with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if TYPE_CHECKING:
    from tests.support.ranks import Pools

IN_CI = os.environ.get("CI", "").lower() == "true"
# Variables that describe a rank: a test that leaves one behind turns the next test into a rank.
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
)
# Pure tests first, whole programs last: a broken function is seen before what is built on it.
FOLDER_ORDER = ("tests/fsdp_core/layout", "tests/fsdp_core", "tests/recipes", "tests/launcher")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        long = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=long)
    items.sort(key=_folder_order)  # stable: inside a folder pytest's own order stays


def _folder_order(item: pytest.Item) -> int:
    for position, folder in enumerate(FOLDER_ORDER):
        if item.nodeid.startswith(folder + "/"):
            return position
    return len(FOLDER_ORDER)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch  # only where a GPU test was selected: pure test runs stay fast

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("gpu"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where every test but a GPU test must run: {reason}"
    return report


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves rank variables or signal handlers changed."""
    variables = {name: os.environ.get(name) for name in RANK_VARIABLES}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    left = {name: os.environ.get(name) for name in RANK_VARIABLES if os.environ.get(name) != variables[name]}
    assert not left, f"the test left environment variables behind: {left}"
    for number, handler in handlers.items():
        assert signal.getsignal(number) is handler, f"the test left a handler of {signal.Signals(number).name} behind"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """Warm ranks, shared by every test of the session: ``ranks(2).run(function, *args)``."""
    from tests.support.ranks import Pools  # loads torch, which tests of the launcher alone do not want

    pools = Pools()
    yield pools
    pools.close()
