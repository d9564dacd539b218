"""The loggers of a run, from its config."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from recipes.context import RankContext
from recipes.loggers.base import FROM_THE_BEGINNING, Logger, Start
from recipes.loggers.jsonl import JsonlLogger
from recipes.loggers.tensorboard import TensorboardLogger
from recipes.loggers.wandb import WandbLogger
from recipes.provenance import recorded_provenance
from recipes.schema import RecipeConfig
from recipes.secrets import HIDDEN, is_secret_name, without_secret_values


def open_loggers(config: RecipeConfig, context: RankContext, start: Start = FROM_THE_BEGINNING) -> list[Logger]:
    """On rank 0 metrics.jsonl and whatever the config names; on other ranks none. A run that goes on behind ``start``
    goes on in the same files and under the same id."""
    if not context.is_main:
        return []
    run_dir = Path(context.run_dir)
    loggers: list[Logger] = [JsonlLogger(run_dir / "metrics.jsonl", start)]
    if config.logger.wandb is not None:
        name = config.run.name or config.model.kind
        shown = without_secrets(config) | {"provenance": recorded_provenance(run_dir)}
        loggers.append(WandbLogger(config.logger.wandb, run_dir, name, shown, start))
    if config.logger.tensorboard is not None:
        loggers.append(TensorboardLogger(run_dir / "tensorboard", start))
    return loggers


def without_secrets(config: object) -> dict:
    """A config as plain data for a service outside: values of ``env`` mappings and whatever looks secret are hidden."""
    plain = dataclasses.asdict(config)  # type: ignore[call-overload]  # any config dataclass
    return {key: _shown(key, value) for key, value in plain.items()}


def _shown(key: str, value: object) -> object:
    if isinstance(value, dict):
        if key == "env":  # variables of a cluster's environment: their names tell, their values may be keys
            return dict.fromkeys(value, HIDDEN)
        return {str(name): _shown(str(name), inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(key, inner) for inner in value]
    if not isinstance(value, str) or not value:
        return value
    return HIDDEN if is_secret_name(key) else without_secret_values(value)
