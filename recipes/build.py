"""From a config to a ``Trainee``: the model built and sharded as asked, its optimizer, scaler and task."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fsdp_core
from recipes.built_groups import BuiltGroups, checked
from recipes.context import RankContext
from recipes.data.records import DataInfo
from recipes.optimizers import build_optimizer
from recipes.portable.init_from import init_from
from recipes.ranks import Ranks
from recipes.recompute import checkpoint_units, compile_units
from recipes.registry import MODELS, Entry
from recipes.schema import RecipeConfig
from recipes.schema.derived import sharding_factor
from recipes.schema.engine import PrecisionConfig, RateLimiterConfig, ShardingConfig
from recipes.seeds import derived_seed
from recipes.step import Trainee
from recipes.tasks import task_for


@dataclass(frozen=True)
class ShardedModel:
    """num_parameters: of the whole model, tables included, over all ranks. units: its own repeated blocks."""

    model: nn.Module
    num_parameters: int
    groups: BuiltGroups
    units: list[nn.Module]


@dataclass(frozen=True)
class Built:
    """trainee: what the step works on. num_parameters: as in ``ShardedModel``."""

    trainee: Trainee
    num_parameters: int
    groups: BuiltGroups


def build_trainee(
    config: RecipeConfig, context: RankContext, ranks: Ranks, info: DataInfo, process_group: Any = None
) -> Built:
    """Collective: every rank builds the same model and keeps its shards. Prints nothing.

    process_group: the engine's ranks; None: all ranks of the run.
    """
    entry = MODELS[config.model.kind]
    task = task_for(entry.task, info)
    sharded = build_sharded(config, context, ranks, info, process_group)
    model = sharded.model
    if config.train.activation_checkpointing:
        checkpoint_units(sharded.units)
    return Built(
        Trainee(
            model=model.train(),
            task=task,
            optimizer=build_optimizer(config.optimizer, model),
            extra_optimizers=extra_optimizers(entry, model, config),
            scaler=gradient_scaler(config.precision, model, ranks.device),
            ranks=ranks,
            clip_norm=math.inf if config.train.clip_norm is None else config.train.clip_norm,
            accumulate_with_communication=config.train.accumulate_with_communication,
        ),
        sharded.num_parameters,
        sharded.groups,
    )


def build_sharded(
    config: RecipeConfig, context: RankContext, ranks: Ranks, info: DataInfo, process_group: Any = None
) -> ShardedModel:
    """The model with its first weights: random, or those of ``model.init_from``. Collective."""
    entry = MODELS[config.model.kind]
    model = build_model(entry, config, info, ranks.device)
    units = unit_modules(entry, model)
    if config.train.compile:
        compile_units(units)
    left_alone = ignored_modules(entry, model, config, ranks)
    keep_weights_in(getattr(torch, config.precision.master_dtype), model, left_alone)
    shard_model(model, entry, config, context, left_alone, process_group)
    fsdp_core.record_flight(model, context.flight)
    groups = checked(fsdp_core.describe(model), config.sharding, config.precision, context)
    if config.model.init_from is not None and ranks.device.type != "meta":  # a plan has no weights
        init_from(model, config.model)
    num_parameters = groups.report.num_parameters + count_over_ranks(left_alone, ranks)
    return ShardedModel(model, num_parameters, groups, units)


def build_model(entry: Entry, config: RecipeConfig, info: DataInfo, device: torch.device) -> nn.Module:
    """Recorded without memory, or built whole: inside ``seeded_init`` the weights have the same bits either way,
    for any number of ranks. On the meta device (a plan) there are no weights."""
    build: Callable[..., nn.Module] = entry.load("build")
    if device.type == "meta":
        with device:
            return build(config.model, info)
    with fsdp_core.seeded_init(derived_seed(config.run.seed, "weights")):
        if config.sharding.init == "deferred":
            return fsdp_core.deferred_init(build, config.model, info)
        return build(config.model, info)


def ignored_modules(entry: Entry, model: nn.Module, config: RecipeConfig, ranks: Ranks) -> list[nn.Module]:
    """What the engine leaves alone (DHEN's tables, sharded by themselves)."""
    if not entry.offers("ignored_modules"):
        return []
    modules = list(entry.load("ignored_modules")(model))
    if config.sharding.init == "eager":  # deferred ones get their memory on the device from ``fully_shard``
        for module in modules:
            module.to(ranks.device)
    return modules


def keep_weights_in(dtype: torch.dtype, model: nn.Module, left_alone: list[nn.Module]) -> None:
    """float32 parameters become ``dtype``, deferred ones when they are built; ``left_alone`` has dtypes of its own."""
    if dtype == torch.float32:
        return
    aside = {id(parameter) for module in left_alone for parameter in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in aside and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)


def count_over_ranks(modules: list[nn.Module], ranks: Ranks) -> int:
    """Parameters of modules whose parameters differ from rank to rank. Collective."""
    return ranks.count(sum(parameter.numel() for module in modules for parameter in module.parameters()))


def unit_modules(entry: Entry, model: nn.Module) -> list[nn.Module]:
    """The model's own repeated blocks, empty for a plugin that names none."""
    if not entry.offers("unit_classes"):
        return []
    classes = tuple(entry.load("unit_classes")())
    return [module for module in model.modules() if isinstance(module, classes)]


def shard_model(
    model: nn.Module,
    entry: Entry,
    config: RecipeConfig,
    context: RankContext,
    left_alone: list[nn.Module],
    process_group: Any,
) -> None:
    """``fully_shard`` with everything the config says. Gradients are summed: the step's loss is a global mean."""
    sharding = config.sharding
    fsdp_core.fully_shard(
        model,
        units=unit_choice(entry, sharding),
        process_group=process_group,
        sharding_factor=sharding_factor(sharding, context.world_size, context.local_world_size),
        reshard_after_forward=sharding.reshard_after_forward,
        mixed_precision=mixed_precision(config.precision),
        backward_prefetch=sharding.backward_prefetch,
        forward_prefetch=sharding.forward_prefetch,
        rate_limit=rate_limit(config.rate_limiter),
        gather_buffers=sharding.gather_buffers,  # type: ignore[arg-type]
        ignored_modules=left_alone,
        cpu_offload=sharding.cpu_offload,
        wire=sharding.wire,  # type: ignore[arg-type]  # the checker allows the engine's choices only
        device=torch.device(context.device),
        ranks_per_host=context.local_world_size,
    )
    fsdp_core.set_gradient_divide_factor(model, 1.0)


def unit_choice(entry: Entry, sharding: ShardingConfig) -> Any:
    """The ``units`` argument of ``fully_shard``; raises ValueError where the model names no blocks."""
    if sharding.units == "size":
        return sharding.min_unit_numel
    if sharding.units == "root":
        return None
    if not entry.offers("unit_classes"):
        raise ValueError(
            f"sharding.units=blocks needs the model '{entry.name}' to name its blocks; give it a static function "
            "unit_classes() that returns their classes, or choose sharding.units=size or sharding.units=root"
        )
    return tuple(entry.load("unit_classes")())


def mixed_precision(precision: PrecisionConfig) -> fsdp_core.MixedPrecision | None:
    """None for float32 throughout."""
    dtypes = (precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype)
    if set(dtypes) == {"float32"}:
        return None
    param, reduce, buffer = (getattr(torch, name) for name in dtypes)
    return fsdp_core.MixedPrecision(param_dtype=param, reduce_dtype=reduce, buffer_dtype=buffer)


def rate_limit(limiter: RateLimiterConfig) -> fsdp_core.RateLimit:
    return fsdp_core.RateLimit(max_inflight=limiter.max_inflight, kind=limiter.kind)  # type: ignore[arg-type]


def gradient_scaler(precision: PrecisionConfig, model: nn.Module, device: torch.device) -> fsdp_core.ShardedGradScaler:
    """Disabled, it passes losses and steps through."""
    return fsdp_core.ShardedGradScaler(
        model,
        device.type,
        init_scale=precision.initial_scale,
        growth_interval=precision.scale_growth_interval,
        enabled=precision.grad_scaler,
    )


def extra_optimizers(entry: Entry, model: nn.Module, config: RecipeConfig) -> tuple[Any, ...]:
    """The model's own, for parameters the engine does not manage."""
    if not entry.offers("extra_optimizers"):
        return ()
    return tuple(entry.load("extra_optimizers")(model, config.model))
