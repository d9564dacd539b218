"""A sharding engine for PyTorch models: flat parameters, any sharding factor, one autograd node per unit."""

from fsdp_core.api import (
    ShardedGradScaler,
    bytes_sent,
    clip_grad_norm_,
    describe,
    flat_parameters,
    full_parameters,
    fully_shard,
    join,
    load_optim_state_dict,
    load_state_dict,
    no_sync,
    observed_order,
    optim_state_dict,
    record_flight,
    register_forward_method,
    set_gradient_divide_factor,
    start_trace,
    state_dict,
    stop_trace,
    verify_schedule,
)
from fsdp_core.held_bytes import HeldBytes, held_bytes
from fsdp_core.init import deferred_init, materialize, seeded_init
from fsdp_core.layout.unit_policy import GroupPolicy, ModuleClassPolicy, PredicatePolicy, SizePolicy, regroup_by_order
from fsdp_core.policy import MixedPrecision, RateLimit
from fsdp_core.state.held_parts import fill_model, held_model, held_optimizer
from fsdp_core.state.limiter_state import limiter_state, load_limiter_state
from fsdp_core.state.optim_state import fill_optimizer
from fsdp_core.wrapper import FullyShardedDataParallel

__all__ = [
    "FullyShardedDataParallel",
    "GroupPolicy",
    "HeldBytes",
    "MixedPrecision",
    "ModuleClassPolicy",
    "PredicatePolicy",
    "RateLimit",
    "ShardedGradScaler",
    "SizePolicy",
    "bytes_sent",
    "clip_grad_norm_",
    "deferred_init",
    "describe",
    "fill_model",
    "fill_optimizer",
    "flat_parameters",
    "full_parameters",
    "fully_shard",
    "held_bytes",
    "held_model",
    "held_optimizer",
    "join",
    "limiter_state",
    "load_limiter_state",
    "load_optim_state_dict",
    "load_state_dict",
    "materialize",
    "no_sync",
    "observed_order",
    "optim_state_dict",
    "record_flight",
    "register_forward_method",
    "regroup_by_order",
    "seeded_init",
    "set_gradient_divide_factor",
    "start_trace",
    "state_dict",
    "stop_trace",
    "verify_schedule",
]
