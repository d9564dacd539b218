"""Recordings kept for reuse: a plan that differs only in hardware or in what no step sees needs no second one."""

from __future__ import annotations

import dataclasses
import json

from recipes.plan.record import RecordedRun, record_run
from recipes.schema import RecipeConfig

# Sections that leave the tape as it is.
_UNSEEN = ("run", "scheduler", "logger", "checkpoint", "hardware", "export", "generate", "calibrate")
_UNSEEN_TRAIN = ("steps", "log_every", "eval_every", "eval_samples", "early_stop", "profile_steps", "trace")


class Recordings:
    """The last ``most`` of this process, by what they were made from."""

    def __init__(self, most: int = 2) -> None:
        self._most = most
        self._kept: dict[str, RecordedRun] = {}

    def of(self, config: RecipeConfig, world_size: int, ranks_per_host: int) -> RecordedRun:
        """Raises UnknownSize as ``record_run``."""
        key = key_of(config, world_size, ranks_per_host)
        found = self._kept.pop(key, None) or record_run(config, world_size, ranks_per_host)
        self._kept[key] = found
        while len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        return found


def key_of(config: RecipeConfig, world_size: int, ranks_per_host: int) -> str:
    """Equal for configs whose steps are alike."""
    names = [field.name for field in dataclasses.fields(RecipeConfig) if field.name not in _UNSEEN]
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in names}
    for name in _UNSEEN_TRAIN:
        del sections["train"][name]
    is_inline = config.hardware.device == "cpu"
    return json.dumps([sections, world_size, ranks_per_host, is_inline], sort_keys=True, default=str)
