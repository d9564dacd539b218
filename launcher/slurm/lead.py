"""How long before its time limit a job is told to save."""

from __future__ import annotations

import math
from pathlib import Path

from launcher.facts import STATE_COPIES
from launcher.schema import Config
from launcher.time_limit import seconds_of
from recipes.checkpoint.folder import SAVE_TIME_FILE
from recipes.data.files import expanded
from recipes.sizes import UnknownSize, expected_facts, model_size

# SLURM looks at its clocks every 30 s, so a signal asked for S seconds ahead comes up to 60 s early.
SLURM_CLOCK_S = 60
START_UP_S = 60  # torch, data and model, before the first step
_LEAVING_S = 10  # ranks end, the job goes back to the queue
_BYTES_PER_S = 200e6  # of one node that writes to a shared file system; a cautious guess
_SHORTEST_SAVE_S = 5.0


def lead_s(config: Config, measured_save_s: float | None = None) -> int:
    """Seconds ahead: reach a step boundary, save (twice the expected time), leave.

    measured_save_s: what a save took in an earlier start of this run; None: guessed from the state's bytes.
    """
    if config.cluster.signal_lead_s is not None:
        return config.cluster.signal_lead_s
    save_s = estimated_save_s(config) if measured_save_s is None else measured_save_s
    return math.ceil(config.cluster.grace_s + 2 * save_s + _LEAVING_S)


def estimated_save_s(config: Config) -> float:
    """Float32 parameters and optimizer state, over the nodes that write them together."""
    try:
        size = model_size(config.model, expected_facts(config.model, config.data))
    except UnknownSize:
        return _SHORTEST_SAVE_S
    num_bytes = 4.0 * size.numel * (1 + STATE_COPIES.get(config.optimizer.kind, 2)) + size.tables_bytes
    return max(_SHORTEST_SAVE_S, num_bytes / (_BYTES_PER_S * config.cluster.num_nodes))


def measured_save_s(run_dir: str | Path | None) -> float | None:
    """What the latest save of the run in this folder took; None if nobody knows."""
    if run_dir is None:
        return None
    try:
        return float((expanded(str(run_dir)) / SAVE_TIME_FILE).read_text())
    except (OSError, ValueError):
        return None


def shortest_limit_s(config: Config, measured_save_s: float | None = None) -> int:
    """The shortest time limit that leaves anything for training."""
    return lead_s(config, measured_save_s) + SLURM_CLOCK_S + START_UP_S


def is_limit_too_short(config: Config, measured_save_s: float | None = None) -> bool:
    """A limit that cannot be read is not too short; another rule tells of it."""
    limit = config.cluster.time_limit
    try:
        return limit is not None and seconds_of(limit) < shortest_limit_s(config, measured_save_s)
    except ValueError:
        return False
