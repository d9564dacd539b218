"""The loggers of a run, from its config."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from recipes.context import RankContext
from recipes.loggers.base import Logger
from recipes.loggers.jsonl import JsonlLogger
from recipes.loggers.tensorboard import TensorboardLogger
from recipes.loggers.wandb import WandbLogger
from recipes.schema import RecipeConfig

_SECRET = re.compile(r"(^|_)(api_?key|token|secret|passw(or)?d|credentials?|auth)$", re.IGNORECASE)


def open_loggers(config: RecipeConfig, context: RankContext, steps_done: int = 0) -> list[Logger]:
    """On rank 0 metrics.jsonl and whatever the config names; on other ranks none."""
    if not context.is_main:
        return []
    run_dir = Path(context.run_dir)
    loggers: list[Logger] = [JsonlLogger(run_dir / "metrics.jsonl", steps_done)]
    if config.logger.wandb is not None:
        name = config.run.name or config.model.kind
        loggers.append(WandbLogger(config.logger.wandb, run_dir, name, without_secrets(config)))
    if config.logger.tensorboard is not None:
        loggers.append(TensorboardLogger(run_dir / "tensorboard", steps_done))
    return loggers


def without_secrets(config: object) -> dict:
    """A config as plain data for a service outside: values of secret names and of ``env`` mappings are hidden."""
    plain = dataclasses.asdict(config)  # type: ignore[call-overload]  # any config dataclass
    return {key: _shown(key, value) for key, value in plain.items()}


def _shown(key: str, value: object) -> object:
    if isinstance(value, dict):
        if key == "env":  # variables of a cluster's environment: their names tell, their values may be keys
            return dict.fromkeys(value, "(hidden)")
        return {str(name): _shown(str(name), inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(key, inner) for inner in value]
    return "(hidden)" if isinstance(value, str) and value and _SECRET.search(key) else value
