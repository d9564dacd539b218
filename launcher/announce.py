"""Lines about the run as a whole that the launcher says before and after it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

from launcher.environment import JoinedRanks
from launcher.streams import lead_nowhere, visible

_BACKENDS = {"cpu": "CPU (gloo)", "cuda": "one GPU each (nccl)"}
_SILENT_RANK_STAYS_S = 20.0


def let_the_first_rank_speak() -> None:
    """For ranks that leave without a word because another one says it: torchrun ends every rank when one has left,
    so a silent one must not be the first. Mostly torchrun ends this wait."""
    time.sleep(_SILENT_RANK_STAYS_S)


def say(text: str, stream: TextIO | None = None) -> None:
    """A line for people, on standard error unless ``stream`` says otherwise.

    Nobody may be reading any more (``| head``, a full disk): the run goes on, so that is no error.
    """
    stream = stream or sys.stderr
    try:
        print(visible(text), file=stream, flush=True)
    except OSError:
        lead_nowhere(stream)


def headline(run_dir: Path, ranks: JoinedRanks, device: str, verb: str) -> str:
    """Where the run's files are, and what runs where. verb: ``started`` or ``joined``."""
    hosts = "this machine" if ranks.num_nodes == 1 else f"{ranks.num_nodes} hosts"
    count = "1 rank" if ranks.world_size == 1 else f"{ranks.world_size} ranks"
    return f"run folder: {short(run_dir)}\n{count} {verb} on {hosts}, {_BACKENDS[device]}"


def short(path: Path) -> Path:
    """Relative to here, where that is shorter to read and to paste."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
