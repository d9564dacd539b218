"""Runs that are stopped at chosen steps and started again, and what they leave, for tests."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

import recipes.loop
import recipes.train
from recipes.checkpoint.folder import checkpoints_of, newest_complete
from recipes.checkpoint.reader import CheckpointReader
from recipes.data.records import Batch
from recipes.loggers.jsonl import read_lines
from recipes.schema import RecipeConfig
from recipes.stop import StoppedFromOutside, StopRequest
from recipes.windows import StepWindow
from tests.recipes.loop.recipes_in_tests import context_of
from tests.support.ranks import Rank

# Of a line of metrics.jsonl, what says how fast and on what it ran rather than what was computed.
_CLOCKS = ("_s", "_bytes", "_per_rank", "_retries", "qps")


class StopAt(StepWindow):
    """Asks to stop while step number ``step`` (from 1) runs, on rank ``rank`` alone."""

    def __init__(self, stop: StopRequest, step: int | None, is_the_rank: bool) -> None:
        self._stop, self._step, self._is_the_rank = stop, step, is_the_rank

    def step_begins(self, step: int) -> None:
        if self._is_the_rank and step + 1 == self._step:
            self._stop.ask("SIGTERM")

    def step_ended(self, step: int) -> str | None:
        return None

    def close(self) -> str | None:
        return None


def run_until(rank: Rank | None, config: RecipeConfig, run_dir: str, stop_at: int | None = None) -> int:
    """One start of the run; steps done when it ended. stop_at: stopped by a signal to the last rank in this step."""
    config = copy.deepcopy(config)
    config.data.cache_dir = run_dir
    context = context_of(rank, Path(run_dir))
    window = StopAt(context.stop, stop_at, context.rank == context.world_size - 1)
    with mock.patch.object(recipes.train, "windows_of", return_value=(window,)):
        try:
            return recipes.train.run(config, context).steps
        except StoppedFromOutside as stopped:
            return stopped.step


def many_until(rank: Rank | None, starts: Sequence[tuple[RecipeConfig, str, int | None]]) -> list[int]:
    return [run_until(rank, *start) for start in starts]


def samples_until(
    rank: Rank | None, config: RecipeConfig, run_dir: str, stop_at: int | None = None
) -> list[list[list[str]]]:
    """As ``run_until``; for each step, for each micro-batch, what identifies its samples."""
    seen: list[list[list[str]]] = []
    with recording(seen):
        run_until(rank, config, run_dir, stop_at)
    return seen


@contextmanager
def recording(seen: list[list[list[str]]]) -> Iterator[None]:
    plain = recipes.loop.train_step

    def step(trainee: Any, micro_batches: Sequence[Batch], *rest: Any) -> Any:
        seen.append([fingerprints(batch) for batch in micro_batches])
        return plain(trainee, micro_batches, *rest)

    with mock.patch.object(recipes.loop, "train_step", step):
        yield


def fingerprints(batch: Batch) -> list[str]:
    """One for each sample."""
    return [
        hashlib.sha256(b"".join(tensor[row].numpy().tobytes() for tensor in batch.values())).hexdigest()[:12]
        for row in range(batch["labels"].shape[0])
    ]


def in_order(per_rank: Sequence[Sequence[Sequence[Sequence[str]]]]) -> list[list[str]]:
    """Each step's samples over all ranks, as the stream hands them out: micro-batch by micro-batch, rank by rank."""
    steps = []
    for parts in zip(*per_rank, strict=True):  # one step: of each rank its micro-batches
        steps.append([sample for cut in zip(*parts, strict=True) for micro_batch in cut for sample in micro_batch])
    return steps


def computed_lines(run_dir: str) -> list[dict[str, Any]]:
    """metrics.jsonl without clocks and memory."""
    lines = read_lines(Path(run_dir) / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.endswith(_CLOCKS)} for line in lines]


def read_steps(run_dir: str) -> list[dict[str, Any]]:
    path = Path(run_dir) / "metrics.jsonl"
    return [line for line in read_lines(path) if "loss" in line] if path.exists() else []


def losses(run_dir: str) -> list[float]:
    return [float(line["loss"]) for line in read_steps(run_dir)]


def saved_tensors(run_dir: str) -> dict[str, Tensor]:
    """Everything of the newest checkpoint: parameters, optimizer state, tables, generators of every rank."""
    found = newest_complete(checkpoints_of(Path(run_dir)))
    assert found is not None
    reader = CheckpointReader(found.path)
    return {name: reader.whole(name).clone() for name in reader.names()}


def saved_state(run_dir: str) -> dict[str, Any]:
    """What else the newest checkpoint holds: position in the data, loss scale, early stop, plain state of ranks."""
    found = newest_complete(checkpoints_of(Path(run_dir)))
    assert found is not None
    manifest = json.loads((found.path / "manifest.json").read_text())
    return {name: manifest[name] for name in ("step", "shared", "per_rank", "eval_loss")}
