"""The engines under test, each at the best settings its documentation names for this job; pinned here.

Every contestant trains the same model on the same batches with fused AdamW. ``make`` returns a ``Training`` whose
``step`` is one whole step: forward, backward, optimizer, clearing gradients.

| name | settings |
|---|---|
| floor | W plain processes, no communication; bf16 keeps an fp32 master copy for the optimizer |
| ddp | gradient_as_bucket_view, static_graph, no buffer broadcast, 25 MB buckets; bf16 as the floor |
| fsdp1 | one flat parameter per unit (use_orig_params=False), limit_all_gathers, backward prefetch "pre" |
| fsdp2 | fully_shard per unit and root, defaults (implicit prefetch), foreach collectives |
| deepspeed | ZeRO stage 3, overlap_comm, contiguous_gradients, no persistence below 1e4, bucket of one unit |
| ours_* | fully_shard per unit, default settings, flat parameters to the optimizer, one wire each |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine_bench.cases import Case
from engine_bench.models import batches, build_model

CPU = torch.device("cpu")
LEARNING_RATE = 1e-4


@dataclass
class Training:
    """One contestant on one rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: list[Any]
    count_bytes: Callable[[], dict[str, int]] | None = None  # bytes sent since the start, where the engine counts
    before_forward: Callable[[], None] | None = None
    before_optimizer: Callable[[], None] | None = None
    clears_gradients: bool = True
    position: int = 0
    last_loss: Tensor = field(default_factory=lambda: torch.zeros(()))

    def step(self) -> None:
        inputs = self.data[self.position % len(self.data)]
        self.position += 1
        if self.before_forward is not None:
            self.before_forward()
        loss = self.model(*inputs)
        loss.backward()
        if self.before_optimizer is not None:
            self.before_optimizer()
        self.optimizer.step()
        if self.clears_gradients:
            self.optimizer.zero_grad()
        self.last_loss = loss.detach()


class DeepSpeedTraining(Training):
    """DeepSpeed's engine owns backward and step."""

    def step(self) -> None:
        inputs = self.data[self.position % len(self.data)]
        self.position += 1
        engine: Any = self.model
        loss = engine(*inputs)
        engine.backward(loss)
        engine.step()
        self.last_loss = loss.detach()


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def make(name: str, case: Case, rank: int) -> Training:
    """Collective over the ranks of one contestant (but for the floor)."""
    model, units = build_model(case.model, case.size)
    data = batches(model.vocab_size, rank)
    maker = MAKERS.get(name)
    if maker is None:
        raise KeyError(f"no contestant {name!r}; there are {', '.join(MAKERS)}")
    return maker(model, units, data, case)


def _floor(model: nn.Module, units: Any, data: list[Any], case: Case) -> Training:
    return _with_master_copy(model, data, case, lambda plain: plain)


def _ddp(model: nn.Module, units: Any, data: list[Any], case: Case) -> Training:
    def wrap(plain: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(
            plain, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False, bucket_cap_mb=25
        )

    return _with_master_copy(model, data, case, wrap)


def _with_master_copy(
    model: nn.Module, data: list[Any], case: Case, wrap: Callable[[nn.Module], nn.Module]
) -> Training:
    """Unsharded training; in bf16 the optimizer keeps fp32 copies of the parameters, as sharded engines do."""
    if case.precision == "fp32":
        return Training(wrap(model), adamw(model.parameters()), data)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model = model.bfloat16()
    low = list(model.parameters())
    for master in masters:
        master.grad = torch.zeros_like(master)
    training = Training(wrap(model), adamw(masters), data, clears_gradients=False)

    def before_optimizer() -> None:
        torch._foreach_copy_([master.grad for master in masters], [parameter.grad for parameter in low])
        for parameter in low:
            parameter.grad = None

    def before_forward() -> None:
        with torch.no_grad():
            torch._foreach_copy_(low, masters)

    training.before_optimizer, training.before_forward = before_optimizer, before_forward
    return training


def _fsdp1(model: nn.Module, units: Any, data: list[Any], case: Case) -> Training:
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    strategy = ShardingStrategy.FULL_SHARD if case.reshard else ShardingStrategy.SHARD_GRAD_OP
    low = torch.bfloat16
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(set(units)),
        sharding_strategy=ShardingStrategy.NO_SHARD if case.replicate else strategy,
        mixed_precision=MixedPrecision(low, low, low) if case.precision == "bf16" else None,
        device_id=CPU,
        use_orig_params=False,
        limit_all_gathers=True,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    )
    return Training(sharded, adamw(sharded.parameters()), data)


def _fsdp2(model: nn.Module, units: Any, data: list[Any], case: Case) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    low = torch.bfloat16
    policy = MixedPrecisionPolicy(low, low) if case.precision == "bf16" else MixedPrecisionPolicy()
    for module in model.modules():
        if isinstance(module, tuple(units)):
            fully_shard(module, mesh=mesh, reshard_after_forward=case.reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=case.reshard, mp_policy=policy)
    return Training(model, adamw(model.parameters()), data)


def _deepspeed(model: nn.Module, units: Any, data: list[Any], case: Case) -> Training:
    import deepspeed  # an extra: pip install deepspeed

    config = {
        "train_micro_batch_size_per_gpu": data[0][0].shape[0],
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "stage3_param_persistence_threshold": 10_000,
            "stage3_prefetch_bucket_size": 5_000_000,
            "stage3_max_live_parameters": 10_000_000 if case.reshard else 1_000_000_000,
            "stage3_max_reuse_distance": 0 if case.reshard else 1_000_000_000,
            "reduce_bucket_size": 5_000_000,
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.precision == "bf16"},
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=adamw(model.parameters()), config=config, dist_init_required=False
    )
    return DeepSpeedTraining(engine, optimizer, data)


def _ours(wire: str) -> Callable[[nn.Module, Any, list[Any], Case], Training]:
    def make_ours(model: nn.Module, units: Any, data: list[Any], case: Case) -> Training:
        import fsdp_core
        from fsdp_core import MixedPrecision

        low = torch.bfloat16
        fsdp_core.fully_shard(
            model,
            units=units,
            sharding_factor=1 if case.replicate else None,
            reshard_after_forward=case.reshard,
            mixed_precision=MixedPrecision(low, low) if case.precision == "bf16" else None,
            wire=wire,  # type: ignore[arg-type]
        )
        parameters = list(fsdp_core.flat_parameters(model))
        return Training(model, adamw(parameters), data, count_bytes=lambda: _bytes_of(model))

    return make_ours


def _bytes_of(model: nn.Module) -> dict[str, int]:
    """Bytes that this rank has sent, by primitive."""
    import fsdp_core

    return {primitive: sent.nbytes for primitive, sent in fsdp_core.bytes_sent(model).items()}


MAKERS: dict[str, Callable[[nn.Module, Any, list[Any], Case], Training]] = {
    "floor": _floor,
    "ddp": _ddp,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
    "ours_shared_memory": _ours("shared_memory"),
    "ours_gloo_p2p": _ours("gloo_p2p"),
    "ours_collectives": _ours("collectives"),
}
