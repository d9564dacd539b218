"""The norm of the whole gradient, where shards make it differ from a sum over one tensor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core.errors import NumericsError
from tests.support.parity import Pair, batches_for
from tests.support.ranks import Pools, Rank


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    return (out.abs() if out.is_complex() else out).pow(2).mean()


def _clip(rank: Rank, dtype: torch.dtype, norm_type: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5, dtype=dtype), nn.Linear(5, 1, dtype=dtype))
    pair = Pair(model, units=[model[0]])
    batches = [batch.to(dtype) for batch in batches_for(rank.world_size, 4, 3)]
    pair.plain_gradients(batches, _loss)
    _loss(pair.sharded, batches[rank.rank]).backward()
    expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01, norm_type)
    norm = fsdp_core.clip_grad_norm_(pair.sharded, 0.01, norm_type)
    rtol = 1e-12 if dtype in (torch.float64, torch.complex128) else 1e-5
    torch.testing.assert_close(norm, expected, rtol=rtol, atol=0)
    pair.check_gradients(rtol=rtol, atol=rtol)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128], ids=str)
def test_norm_and_clipped_gradients_in_every_dtype(ranks: Pools, dtype: torch.dtype, norm_type: float) -> None:
    ranks(2).run(_clip, dtype, norm_type)


def _torchs_clip(rank: Rank, dtype: torch.dtype, norm_type: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5, dtype=dtype), nn.Linear(5, 1, dtype=dtype))
    pair = Pair(model, units=[model[0]])
    batches = [batch.to(dtype) for batch in batches_for(rank.world_size, 4, 3)]
    pair.plain_gradients(batches, _loss)
    _loss(pair.sharded, batches[rank.rank]).backward()
    expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01, norm_type)
    torch.testing.assert_close(nn.utils.clip_grad_norm_(pair.sharded.parameters(), 0.01, norm_type), expected)
    pair.check_gradients()
    if norm_type <= 0:
        with pytest.raises(NumericsError, match="norm_type above 0"):
            fsdp_core.clip_grad_norm_(pair.sharded, 0.01, norm_type)


@pytest.mark.parametrize("norm_type", [2.0, 0.5, math.inf, 0.0, -1.0, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_torchs_own_clipping_has_the_norms_of_whole_parameters(
    ranks: Pools, dtype: torch.dtype, norm_type: float
) -> None:
    """Also where a rank has no element of a parameter, and for orders that the engine's own refuses."""
    ranks(3).run(_torchs_clip, dtype, norm_type)


def test_a_model_without_parameters_has_a_norm_of_zero() -> None:
    assert fsdp_core.clip_grad_norm_(fsdp_core.fully_shard(nn.Sequential(nn.ReLU())), 1.0) == 0


def _not_a_number(rank: Rank, wire: str, where: int) -> tuple[float, bool]:
    model = fsdp_core.FullyShardedDataParallel(nn.Linear(4, 4, bias=False), wire=wire)
    model(torch.ones(1, 4)).sum().backward()
    if rank.rank == where:
        model.weight.grad.local[0] = math.nan
    try:
        norm = model.clip_grad_norm_(1.0, math.inf, error_if_nonfinite=True)
    except NumericsError:
        return 0.0, True
    return norm.item(), False


@pytest.mark.parametrize("wire", ["collectives", "gloo_p2p", "shared_memory"])
@pytest.mark.parametrize("where", [0, 1])
def test_nan_on_one_rank_is_seen_by_all_under_the_largest_norm(ranks: Pools, wire: str, where: int) -> None:
    assert ranks(2).run(_not_a_number, wire, where) == [(0.0, True)] * 2
