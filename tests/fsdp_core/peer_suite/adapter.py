"""torch's own test harness for FSDP on our wrapper: the vocabulary of one in terms of the other.

``torch.testing._internal.common_fsdp`` trains each of its models under DDP and under whatever its module-level name
``FSDP`` is, and compares loss and parameters. Here that name is ``PeerAdapter``. Nothing of the harness's models or
of its parity driver is rewritten; what it patches inside torch's FSDP to delay ranks is done to our engine as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.testing._internal import common_fsdp
from torch.testing._internal.common_utils import TestCase

import fsdp_core
from fsdp_core.handle.flat_param_handle import FlatParamHandle
from tests.support.parity import is_idle

Strategy = ShardingStrategy
# (F as a fraction of the group, reshard_after_forward)
NUMBERS: dict[ShardingStrategy | None, tuple[str, bool]] = {
    None: ("all", True),
    Strategy.FULL_SHARD: ("all", True),
    Strategy.SHARD_GRAD_OP: ("all", False),
    Strategy.NO_SHARD: ("one", True),
    Strategy.HYBRID_SHARD: ("half", True),
    Strategy._HYBRID_SHARD_ZERO2: ("half", False),
}


def factor_of(share: str, num_ranks: int) -> int:
    """The sharding factor that a strategy stands for in a group of ``num_ranks``."""
    return {"all": num_ranks, "one": 1, "half": max(1, num_ranks // 2)}[share]


class PeerAdapter(fsdp_core.FullyShardedDataParallel):
    """Our wrapper, with the objects that torch's harness passes turned into our two numbers and plain settings."""

    wire = "auto"  # the harness has no word for it: set around a case

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        *,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: Any = None,
        mixed_precision: Any = None,
        use_orig_params: bool = True,  # ours always has the original parameters
        **options: Any,
    ) -> None:
        group = process_group if process_group is not None else dist.group.WORLD
        share, reshard = NUMBERS[sharding_strategy]
        if mixed_precision is not None:
            options["mixed_precision"] = fsdp_core.MixedPrecision(
                param_dtype=mixed_precision.param_dtype,
                reduce_dtype=mixed_precision.reduce_dtype,
                buffer_dtype=mixed_precision.buffer_dtype,
                # torch casts the root's inputs and, if asked, every unit's; ours is one setting for both
                cast_forward_inputs=mixed_precision.cast_forward_inputs or mixed_precision.cast_root_forward_inputs,
            )
        self.__dict__["sharding_strategy"] = sharding_strategy
        super().__init__(
            module,
            process_group,
            sharding_factor=factor_of(share, dist.get_world_size(group)),
            reshard_after_forward=reshard,
            cpu_offload=bool(cpu_offload is not None and cpu_offload.offload_params),
            wire=self.wire,
            **options,
        )

    @staticmethod
    def summon_full_params(module: nn.Module, recurse: bool = True, writeback: bool = True, **options: Any) -> Any:
        assert recurse, "the harness always recurses"
        return fsdp_core.full_parameters(module, writeback=writeback, **options)

    def _assert_state(self, state: Any) -> None:
        """The harness asks for IDLE after training: with us that includes that no buffer is out and nothing waits."""
        assert state.name == "IDLE"
        assert is_idle(self), "the engine is not idle after training"


class PeerDriver(common_fsdp.FSDPTestMixin, TestCase):
    """The harness's parity driver inside a rank that is already running."""

    def __init__(self) -> None:
        super().__init__()
        self.process_group = dist.group.WORLD
        self.rank = dist.get_rank()

    def runTest(self) -> None:
        return None

    def _train_for_several_steps(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        def scaler(enabled: bool, **settings: Any) -> torch.amp.GradScaler:
            if isinstance(model, PeerAdapter):
                return fsdp_core.ShardedGradScaler(model, enabled=enabled, **settings)
            return ShardedGradScaler("cpu", enabled=enabled, **settings)  # torch's switches itself off without CUDA

        with mock.patch.object(common_fsdp, "ShardedGradScaler", scaler):
            return super()._train_for_several_steps(model, *args, **kwargs)

    def check(self, *args: Any, **kwargs: Any) -> None:
        self._test_fsdp_parity(*args, **kwargs)


def _summed_loss(model: nn.Module, batch: Any, output: torch.Tensor) -> torch.Tensor:
    """The harness's loss. It expects fp32 of its reference under autocast: CUDA sums so by itself, CPU does not."""
    return output.float().sum() if torch.is_autocast_enabled("cpu") else output.sum()


@contextmanager
def peer_harness(wire: str, delays: bool, reshard_delay_ms: int = 0) -> Iterator[PeerDriver]:
    """The harness with our engine in it.

    delays: let the harness's models really sleep; it does so with ``time.sleep`` on devices it takes for an XPU.
    reshard_delay_ms: sleep before each reshard, which the harness can only do to torch's own engine.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(common_fsdp, "FSDP", PeerAdapter))
        stack.enter_context(mock.patch.object(PeerAdapter, "wire", wire))
        stack.enter_context(mock.patch.object(common_fsdp.NestedWrappedModule, "get_loss", _summed_loss))
        if delays:
            stack.enter_context(mock.patch.object(common_fsdp, "TEST_XPU", True))
        if reshard_delay_ms:
            original = FlatParamHandle.reshard

            def delayed(handle: FlatParamHandle) -> None:
                time.sleep(reshard_delay_ms / 1000)
                original(handle)

            stack.enter_context(mock.patch.object(FlatParamHandle, "reshard", delayed))
        yield PeerDriver()
