"""torch's FSDP harness against our engine: every model, every strategy, both prefetches. See docs/peer_suite.md."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fsdp_core.peer_suite.cases import LONG, QUICK, Case
from tests.fsdp_core.peer_suite.table import HEAD, rows
from tests.support.ranks import ROOT, Pools, Rank

DELAY_MS = 5


def _delays(case: Case, rank: int) -> dict[str, Any]:
    """Only the first rank is slow: ranks that sleep alike would stay in step."""
    slow_ms = DELAY_MS if rank == 0 else 0
    if case.model.endswith("after the loss"):
        return {"delay_after_loss_ms": slow_ms}
    if case.model.endswith("before the reduction"):
        return {"delay_before_reduction_ms": slow_ms}
    if case.model.endswith("before the reshard"):
        return {"delay_before_free_ms": slow_ms}
    return {}


def _run(rank: Rank, case: Case) -> None:
    import torch
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
    from torch.testing._internal import common_fsdp

    from tests.fsdp_core.peer_suite.adapter import peer_harness

    delays = _delays(case, rank.rank)
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[case.strategy],
        "backward_prefetch": None if case.backward_prefetch == "off" else BackwardPrefetch[case.backward_prefetch],
        "forward_prefetch": case.forward_prefetch,
        "init_kwargs": delays,
    }
    if "MixtureOfExperts" in case.model:
        options["ref_init_fn"] = common_fsdp.DummyDDP  # experts differ by rank; the model reduces the rest itself
    if case.extra == "offload":
        options["cpu_offload"] = CPUOffload(offload_params=True)
    elif case.extra == "scaler":
        options |= {"enable_sharded_grad_scaler": True, "num_iters": 4}
        options["sharded_grad_scaler_kwargs"] = {"init_scale": 2.0**10, "growth_interval": 2}
    elif case.extra == "bf16":
        low = torch.bfloat16
        options["mixed_precision"] = MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low)
        options |= {"num_iters": 1}
    model = getattr(common_fsdp, case.model.partition(",")[0])
    reshard_delay_ms = delays.get("delay_before_free_ms", 0)
    with peer_harness(case.wire, bool(delays), reshard_delay_ms) as driver:
        driver.check(model, common_fsdp.FSDPInitMode.RECURSIVE, common_fsdp.DEVICEInitMode.DEVICE_BEFORE, **options)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_parity_with_ddp(ranks: Pools, case: Case) -> None:
    ranks(case.world_size).run(_run, case)


@pytest.mark.full
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_parity_with_ddp_elsewhere(ranks: Pools, case: Case) -> None:
    ranks(case.world_size).run(_run, case)


def test_the_docs_list_every_case() -> None:
    page = (ROOT / "docs" / "peer_suite.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| ")] == [HEAD[0], *rows()]
