"""Small recipes for tests: the tiny presets on samples made from nothing, and what ranks run with them."""

from __future__ import annotations

import copy
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from recipes.boundary import Boundary
from recipes.build import build_trainee
from recipes.checkpoint.checkpointer import Checkpointer
from recipes.context import RankContext
from recipes.data.records import Batch, DataInfo, Dataset, PrepareRequest, Splits
from recipes.loop import Loop
from recipes.metrics.clock import step_clock
from recipes.metrics.ledger import Line
from recipes.prepare import eval_batches, prepare_splits, train_batches
from recipes.ranks import Ranks
from recipes.registry import DATA, MODELS, Entry
from recipes.report import Report
from recipes.saver import Saver
from recipes.schedulers import schedule
from recipes.schema import RecipeConfig
from recipes.schema.data import DataConfig
from recipes.schema.training import AdamWConfig, SchedulerConfig
from recipes.seeds import seed_training
from recipes.train import step_ledger
from recipes.windows import windows_of
from tests.support.ranks import ROOT, Rank

VOCAB, SEQ_LEN, TARGET_LEN = 61, 24, 12
TABLE_ROWS, NUM_DENSE = (50, 7, 1000, 3), 5
PRESETS = {"gpt": "gpt_tiny", "t5": "t5_tiny", "dhen": "dhen_tiny"}
SMALLER = {
    "gpt": {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "max_seq_len": 32},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 1},
    "dhen": {
        "embedding_dim": 8,
        "num_tokens": 8,
        "dlrm_hidden": 16,
        "dcn_rank": 8,
        "bottom_mlp": [16],
        "top_mlp": [16],
    },
}


@dataclass
class MadeUpConfig(DataConfig):
    kind: str = "made_up"
    num_samples: int = 96
    is_new_each_epoch: bool = True
    poisoned_epoch: int | None = None  # its first sample holds a NaN


class MadeUp(Dataset):
    """Sample i of an epoch follows from (i, epoch) alone. Text counts a different number of targets per sample."""

    def __init__(
        self,
        task: str,
        num_samples: int,
        first: int,
        is_new_each_epoch: bool = True,
        poisoned_epoch: int | None = None,
    ) -> None:
        self._poisoned_epoch = poisoned_epoch
        self._task, self._num_samples, self._first = task, num_samples, first
        self._is_new_each_epoch = is_new_each_epoch

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        samples = [self._sample(self._first + index, epoch) for index in indices]
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def _sample(self, index: int, epoch: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * epoch * self._is_new_each_epoch + index)
        if self._task == "clicks":
            sparse = torch.stack([torch.randint(rows, (), generator=generator) for rows in TABLE_ROWS])
            dense = torch.randn(NUM_DENSE, generator=generator)
            labels = (dense.sum() + sparse[1] - 3 > 0).float()
            if index == self._first and epoch == self._poisoned_epoch:
                dense = torch.full_like(dense, float("nan"))
            return {"dense": dense, "sparse": sparse, "labels": labels}
        tokens = torch.randint(2, VOCAB, (SEQ_LEN + 1,), generator=generator)
        tokens[1::2] = tokens[:-1:2]  # every second token can be learnt
        labels = tokens[1:].clone() if self._task == "causal_lm" else tokens[:TARGET_LEN].clone()
        labels[labels.numel() - index % 5 :] = -100
        return {"input_ids": tokens[:-1], "labels": labels}


def prepare(config: MadeUpConfig, request: PrepareRequest) -> Splits:
    info = DataInfo(
        request.task,
        vocab_size=VOCAB,
        seq_len=SEQ_LEN,
        target_len=TARGET_LEN,
        bytes_per_token=1.0,
        num_dense=NUM_DENSE,
        table_rows=TABLE_ROWS,
        num_train=config.num_samples,
        num_eval=10,
        description="made-up samples",
    )
    train = MadeUp(request.task, config.num_samples, 0, config.is_new_each_epoch, config.poisoned_epoch)
    return Splits(train, MadeUp(request.task, 10, 10_000), info)


if DATA.get("made_up") is None:
    DATA.add(Entry("made_up", MadeUpConfig, "text", None, {"prepare": prepare}))


def recipe(kind: str, **changes: Any) -> RecipeConfig:
    """A tiny preset with AdamW, decay by name, clipping and warm-up; ``changes`` by dotted path with __ for dots."""
    config = RecipeConfig()
    preset = yaml.safe_load((ROOT / "configs" / "model" / f"{PRESETS[kind]}.yaml").read_text())
    config.model = MODELS[kind].config(**preset)
    config.data = MadeUpConfig(cache_dir="unused")
    config.optimizer = AdamWConfig(lr=1e-3, weight_decay=0.1)
    config.scheduler = SchedulerConfig(kind="cosine", warmup_steps=3)
    config.train.steps, config.train.global_batch, config.train.eval_samples = 20, 8, 0
    for path, value in changes.items():
        *folders, name = path.split("__")
        owner: Any = config
        for folder in folders:
            owner = getattr(owner, folder)
        assert name in vars(owner), f"{path} is no field of the config"
        setattr(owner, name, value)
    return config


def small_recipe(kind: str, **changes: Any) -> RecipeConfig:
    """A fraction of the tiny preset, where the numbers do not matter."""
    return recipe(kind, **({f"model__{name}": value for name, value in SMALLER[kind].items()} | changes))


def context_of(rank: Rank | None, run_dir: Path = Path("nowhere")) -> RankContext:
    number, world_size = (0, 1) if rank is None else (rank.rank, rank.world_size)
    return RankContext(number, world_size, number, world_size, 0, 1, ("here",) * world_size, "cpu", run_dir)


def lines_of(rank: Rank | None, config: RecipeConfig, run_dir: Path = Path("nowhere")) -> list[Line]:
    """Every step's line of a run without loggers, report and pictures; traces go to ``run_dir``."""
    config = copy.deepcopy(config)
    config.data.cache_dir = tempfile.gettempdir()  # nothing is written there
    context = context_of(rank, run_dir)
    ranks, report = Ranks.of(context), Report(False, False)
    splits = prepare_splits(config, ranks, report)
    built = build_trainee(config, context, ranks, splits.info)
    seed_training(config.run, context.rank)
    kept = KeptLines()
    with tempfile.TemporaryDirectory() as folder, train_batches(config, splits, ranks) as batches:
        root = Path(ranks.tell(folder)) / "checkpoints"
        checkpointer = Checkpointer(root, built.trainee, ranks, config.checkpoint, 1, {})
        Loop(
            config=config,
            trainee=built.trainee,
            batches=batches,
            held_out=eval_batches(config, splits, ranks),
            lr=schedule(config.scheduler, config.optimizer.lr, config.train.steps),
            clock=step_clock(ranks.device),
            ledger=step_ledger(config, splits, built, ranks),
            loggers=[kept],  # type: ignore[list-item]
            report=report,
            boundary=Boundary(ranks, context.stop),
            saver=Saver(config.checkpoint, checkpointer, ranks, root.parent, {}),
            windows=windows_of(config.train, context, built.trainee.model),
        ).run()
    return kept.lines


def gathers_of(rank: Rank, config: RecipeConfig, folder: str) -> list[dict[str, int]]:
    """How often each unit was gathered in each step."""
    config.train.trace = True
    lines_of(rank, config, Path(folder))
    text = (Path(folder) / "trace" / f"rank{rank.rank}.jsonl").read_text()
    events = [json.loads(line) for line in text.splitlines()]
    steps = sorted({event["step"] for event in events})
    return [
        dict(Counter(event["unit"] for event in events if event["step"] == step and event["kind"] == "gather"))
        for step in steps
    ]


class KeptLines:
    """A logger that keeps what it gets, on every rank."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def log(self, step: int, metrics: Line) -> None:
        self.lines.append(dict(metrics))

    def flush(self) -> None:
        pass


def losses_of(rank: Rank | None, config: RecipeConfig) -> list[float]:
    return [float(line["loss"] or 0.0) for line in lines_of(rank, config)]


def many_losses(rank: Rank, configs: list[RecipeConfig]) -> list[list[float]]:
    return [losses_of(rank, config) for config in configs]


def many_lines(rank: Rank, configs: list[RecipeConfig]) -> list[list[Line]]:
    return [lines_of(rank, config) for config in configs]


def ranks_at_work(rank: Rank) -> dict[str, Any]:
    """Every operation of ``Ranks`` once."""
    ranks = Ranks.of(context_of(rank))
    ranks.barrier()
    return {
        "sum": ranks.sum(torch.tensor([1.0, rank.rank])).tolist(),
        "max": ranks.max(torch.tensor([5 - rank.rank, rank.rank])).tolist(),
        "gather": ranks.gather(torch.tensor([[rank.rank, 7]])).tolist(),
    }
