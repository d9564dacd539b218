"""``RecipeConfig``: everything a rank needs to train, already checked. The launcher adds how ranks come to be."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.schema.actions import CalibrateConfig, ExportConfig, GenerateConfig, PlanConfig
from recipes.schema.data import DataConfig
from recipes.schema.engine import PrecisionConfig, RateLimiterConfig, ShardingConfig
from recipes.schema.fields import described
from recipes.schema.model import ModelConfig
from recipes.schema.training import (
    CheckpointConfig,
    HardwareConfig,
    LoggerConfig,
    OptimizerConfig,
    RunConfig,
    SchedulerConfig,
    TrainConfig,
)


@dataclass
class RecipeConfig:
    """One run. ``model``, ``data`` and ``optimizer`` hold the dataclass of their ``kind``."""

    run: RunConfig = described(RunConfig, "identity and reproducibility")
    model: ModelConfig = described(ModelConfig, "what is trained")
    data: DataConfig = described(DataConfig, "what it is trained on")
    optimizer: OptimizerConfig = described(OptimizerConfig, "how parameters are updated")
    scheduler: SchedulerConfig = described(SchedulerConfig, "learning rate over steps")
    train: TrainConfig = described(TrainConfig, "the loop")
    sharding: ShardingConfig = described(ShardingConfig, "the engine's two numbers, and units")
    precision: PrecisionConfig = described(PrecisionConfig, "dtypes")
    rate_limiter: RateLimiterConfig = described(RateLimiterConfig, "cap on gathers in flight")
    logger: LoggerConfig = described(LoggerConfig, "where metrics go")
    checkpoint: CheckpointConfig = described(CheckpointConfig, "saving and resuming")
    hardware: HardwareConfig = described(HardwareConfig, "profile for MFU and planning")
    plan: PlanConfig = described(PlanConfig, "whose habits a plan assumes")
    export: ExportConfig = described(ExportConfig, "a checkpoint as a Hugging Face folder")
    calibrate: CalibrateConfig = described(CalibrateConfig, "this machine as a hardware profile")
    generate: GenerateConfig = described(GenerateConfig, "text from a checkpoint")
