"""A sharding engine for PyTorch models: flat parameters, any sharding factor, one autograd node per unit."""

from fsdp_core.api import (
    FullyShardedDataParallel,
    ShardedGradScaler,
    clip_grad_norm_,
    describe,
    flat_parameters,
    full_parameters,
    fully_shard,
    join,
    load_optim_state_dict,
    load_state_dict,
    no_sync,
    optim_state_dict,
    register_forward_method,
    set_gradient_divide_factor,
    start_trace,
    state_dict,
    stop_trace,
)
from fsdp_core.init import deferred_init, materialize, seeded_init
from fsdp_core.policy import MixedPrecision, RateLimit

__all__ = [
    "FullyShardedDataParallel",
    "MixedPrecision",
    "RateLimit",
    "ShardedGradScaler",
    "clip_grad_norm_",
    "deferred_init",
    "describe",
    "flat_parameters",
    "full_parameters",
    "fully_shard",
    "join",
    "load_optim_state_dict",
    "load_state_dict",
    "materialize",
    "no_sync",
    "optim_state_dict",
    "register_forward_method",
    "seeded_init",
    "set_gradient_divide_factor",
    "start_trace",
    "state_dict",
    "stop_trace",
]
