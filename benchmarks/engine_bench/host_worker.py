"""The process of one engine in the host benchmark: rank 0 of 8 on a fake group.

    python -m engine_bench.host_worker FD RANK WORLD_SIZE PORT ENGINE JSON

Command (pickled tuple): ("steps", n) -> (seconds of forward and backward, seconds of the optimizer), per step.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from engine_bench.contestants import adamw
from engine_bench.models import TinyBlock, build_tiny_units
from engine_bench.serve import serve

WORLD_SIZE = 8


def main() -> None:
    serve(int(sys.argv[1]), lambda: _start(sys.argv[5], **json.loads(sys.argv[6])))


def _start(engine: str, num_units: int, reshard: bool) -> Any:
    if engine != "plain":
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

        dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    model, parameters = _build(engine, build_tiny_units(num_units), reshard)
    optimizer = adamw(parameters)
    x = torch.randn(2, 8)

    def answer(command: tuple[Any, ...]) -> tuple[float, float]:
        passes = updates = 0.0
        gc.collect()
        for _ in range(command[1]):
            started = time.perf_counter()
            model(x).sum().backward()
            middle = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            passes += middle - started
            updates += time.perf_counter() - middle
        return passes / command[1], updates / command[1]

    return answer


def _build(engine: str, model: nn.Module, reshard: bool) -> tuple[nn.Module, list[Any]]:
    if engine == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({TinyBlock}),
            sharding_strategy=ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP,
            device_id=torch.device("cpu"),
            use_orig_params=False,
        )
    elif engine == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    elif engine == "ours":
        import fsdp_core

        fsdp_core.fully_shard(model, units=(TinyBlock,), reshard_after_forward=reshard)
        return model, list(fsdp_core.flat_parameters(model))
    return model, list(model.parameters())


if __name__ == "__main__":
    main()
