"""From a data config to splits of samples and this rank's batches."""

from __future__ import annotations

import os
from pathlib import Path

from recipes.data.errors import DataError
from recipes.data.files import expanded
from recipes.data.loading import EvalBatches, TrainBatches
from recipes.data.records import DataInfo, PrepareRequest, Splits
from recipes.data.stream import SampleStream
from recipes.data.text import text_info
from recipes.ranks import Ranks
from recipes.registry import DATA, MODELS
from recipes.report import Report
from recipes.schema import RecipeConfig
from recipes.schema.data import TextDataConfig
from recipes.schema.derived import micro_batch


def prepare_splits(config: RecipeConfig, ranks: Ranks, report: Report) -> Splits:
    """Rank 0 prepares (tokenises, caches), the others wait for it. Collective."""
    cache_dir = data_cache_dir(config.data.cache_dir)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"data.cache_dir: {cache_dir} cannot be made: {error.strerror}. Expected a folder that you may write to; "
            "set data.cache_dir to another one"
        ) from error

    def told(line: str) -> None:
        ranks.flight.event("progress", "preparing data")  # the other ranks wait for this one: it is alive
        report.line(line)

    request = PrepareRequest(
        task=MODELS[config.model.kind].task,
        seed=data_seed(config),
        # By convention of the schema: what a model of fixed sizes asks of its samples.
        seq_len=getattr(config.model, "max_seq_len", None),
        image_size=getattr(config.model, "image_size", None),
        is_main=ranks.is_main,
        barrier=ranks.barrier,
        cache_dir=cache_dir,
        report=told,
    )
    splits: Splits = DATA[config.data.kind].load("prepare")(config.data, request)
    return splits


def data_info(config: RecipeConfig, ranks: Ranks, report: Report) -> DataInfo:
    """Facts about the data for those who read none of it: prepared only where there is no other way. Collective."""
    if isinstance(config.data, TextDataConfig):
        task = MODELS[config.model.kind].task
        info = text_info(config.data, task, getattr(config.model, "max_seq_len", None))
        if info is not None:
            return info
    return prepare_splits(config, ranks, report).info


def data_seed(config: RecipeConfig) -> int:
    return config.run.seed if config.data.shuffle_seed is None else config.data.shuffle_seed


def data_cache_dir(configured: str | None) -> Path:
    """As configured, or the user's cache folder by the XDG rule."""
    if configured is not None:
        return expanded(configured)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fsdp-launcher"


def train_batches(config: RecipeConfig, splits: Splits, ranks: Ranks) -> TrainBatches:
    """Endless steps of this rank's micro-batches, read ahead by a thread; close it."""
    stream = SampleStream(
        len(splits.train),
        data_seed(config),
        config.train.global_batch,
        fingerprint=str(splits.info.extras.get("fingerprint", "")),
    )
    return TrainBatches(
        splits.train,
        stream,
        rank=ranks.rank,
        world_size=ranks.world_size,
        micro_batch=micro_batch(config.train, ranks.world_size),
        pin_memory=ranks.device.type == "cuda",
        on_error=config.data.on_error,
    )


def eval_batches(config: RecipeConfig, splits: Splits, ranks: Ranks) -> EvalBatches | None:
    """None where nothing is held out or no evaluation is wanted."""
    if config.train.eval_samples == 0 or len(splits.eval) == 0:
        return None
    return EvalBatches(
        splits.eval,
        config.train.eval_samples,
        rank=ranks.rank,
        world_size=ranks.world_size,
        micro_batch=micro_batch(config.train, ranks.world_size),
        on_error=config.data.on_error,
    )
