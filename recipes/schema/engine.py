"""What the sharding engine is told: sharding, precision, rate limiter."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.schema.fields import described

DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class ShardingConfig:
    """The engine's two numbers, F and reshard-after-forward, and how units are cut and fetched."""

    default_factor: str = described(
        "world",
        "what a null factor means: world (W), host (cluster.nproc_per_node) or one",
        choices=("world", "host", "one"),
    )
    factor: int | None = described(
        None, "sharding factor F: ranks a parameter is split over; divides W; null: default_factor", at_least=1
    )
    reshard_after_forward: bool = described(
        True, "free gathered parameters between forward and backward (RAF) or keep them (NRAF)"
    )
    units: str = described(
        "blocks",
        "blocks: the model's own repeated blocks; size: modules of at least min_unit_numel; root: one unit",
        choices=("blocks", "size", "root"),
    )
    min_unit_numel: int = described(1_000_000, "for units=size", at_least=1)
    backward_prefetch: bool = described(True, "gather the next unit ahead of this unit's reduce-scatter")
    forward_prefetch: bool = described(
        False, "issue the next forward gather early, in the last iteration's order (static graphs)"
    )
    gather_buffers: str = described(
        "pooled",
        "pooled: few, reused; allocator: a fresh allocation each time, as in the paper",
        choices=("pooled", "allocator"),
    )
    cpu_offload: bool = described(False, "keep shards and optimizer state in host memory")
    wire: str = described(
        "auto", "transport of the collectives", choices=("auto", "collectives", "gloo_p2p", "shared_memory")
    )
    init: str = described(
        "deferred",
        "deferred: record, then build unit by unit into shards; eager: build whole on every rank first",
        choices=("deferred", "eager"),
    )


@dataclass
class PrecisionConfig:
    """Dtypes of compute, of gradient reduction, of buffers and of the copy that the optimizer updates."""

    param_dtype: str = described("float32", "forward, backward and the all-gather", choices=DTYPES)
    reduce_dtype: str = described("float32", "gradient reduction", choices=DTYPES)
    buffer_dtype: str = described("float32", "floating-point buffers", choices=DTYPES)
    master_dtype: str = described(
        "float32",
        "the shards that the optimizer updates, their gradients and its state; bfloat16 (with param_dtype=bfloat16 "
        "only) halves their memory and loses updates smaller than 1/256 of a weight",
        choices=("float32", "bfloat16"),
    )
    grad_scaler: bool = described(False, "scale the loss and agree on skipped steps over all ranks; float16 needs it")
    initial_scale: float = described(65536.0, "first loss scale", above=0)
    scale_growth_interval: int = described(2000, "steps without overflow before the scale doubles", at_least=1)


@dataclass
class RateLimiterConfig:
    """Cap on all-gathers in flight (the unit being computed counts)."""

    kind: str = described("fixed", "fixed, adaptive or unlimited", choices=("fixed", "adaptive", "unlimited"))
    max_inflight: int = described(2, "gathers in flight; 2 is one unit computing and one arriving", at_least=1)
