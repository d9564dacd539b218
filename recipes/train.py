"""``run``: one recipe on one rank, from a checked config to a summary. Start reading here.

seeds, kernels -> samples (prepare) -> model, shards, optimizer (build) -> steps (loop, step) -> summary, picture
"""

from __future__ import annotations

import time
from pathlib import Path

from fsdp_core import bytes_sent
from recipes.build import Built, build_trainee
from recipes.context import RankContext
from recipes.data.loading import TrainBatches
from recipes.data.records import DataInfo, Splits
from recipes.flight.recorder import CLOSING
from recipes.loggers import Logger, open_loggers
from recipes.loop import Loop, LoopResult
from recipes.loss_picture import draw_loss
from recipes.metrics.clock import step_clock
from recipes.metrics.flops import peak_flops, sample_flops
from recipes.metrics.ledger import Ledger, StepShape
from recipes.metrics.memory import memory_meter
from recipes.prepare import eval_batches, prepare_splits, train_batches
from recipes.ranks import Ranks
from recipes.registry import MODELS
from recipes.report import Report
from recipes.schedulers import schedule
from recipes.schema import RecipeConfig
from recipes.seeds import choose_kernels, seed_training
from recipes.summary import Summary
from recipes.windows import StepWindow, windows_of


def run(config: RecipeConfig, context: RankContext) -> Summary:
    """Train as ``config`` says; called by every rank of the run, with the default process group made when W > 1.

    Leaves in ``context.run_dir`` (rank 0): metrics.jsonl, summary.json, loss.png, and what the config asks for.
    Raises whatever goes wrong, on the rank where it does; ending the others is the launcher's part.
    """
    started = time.perf_counter()
    ranks, report = Ranks.of(context), Report.of(context)
    choose_kernels(config.run)
    context.flight.event("progress", "preparing data")
    splits = prepare_splits(config, ranks, report)
    context.flight.event("progress", "building the model")
    built = build_trainee(config, context, ranks, splits.info)
    for line in opening_lines(config, splits.info, built):
        report.line(line)
    seed_training(config.run, context.rank)
    result = train(config, context, ranks, splits, built, report, started)
    report.line(result.text())
    return result


def train(
    config: RecipeConfig,
    context: RankContext,
    ranks: Ranks,
    splits: Splits,
    built: Built,
    report: Report,
    started: float,
) -> Summary:
    """The loop and what it leaves behind; closes everything it opened, whatever happens."""
    loggers = open_loggers(config, context)
    windows = windows_of(config.train, context, built.trainee.model)
    summary: Summary | None = None
    try:
        with train_batches(config, splits, ranks) as batches:
            loop = Loop(
                config=config,
                trainee=built.trainee,
                batches=batches,
                held_out=eval_batches(config, splits, ranks),
                lr=schedule(config.scheduler, config.optimizer.lr, config.train.steps),
                clock=step_clock(ranks.device),
                ledger=step_ledger(config, splits, built, ranks, batches),
                loggers=loggers,
                report=report,
                windows=windows,
            )
            result = loop.run()
        context.flight.enter(CLOSING)
        summary = summarise(context, built, result, time.perf_counter() - started)
        leave_behind(summary, config, context)
    finally:
        close_all(windows, loggers, report, summary)
    return summary


def step_ledger(
    config: RecipeConfig, splits: Splits, built: Built, ranks: Ranks, batches: TrainBatches | None = None
) -> Ledger:
    """Every sample has the same shape, so one says how many tokens a step has."""
    task, global_batch = built.trainee.task, config.train.global_batch
    entry = MODELS[config.model.kind]
    units = task.count_units(splits.train.batch([0], epoch=0)) * global_batch
    return Ledger(
        ranks,
        memory_meter(ranks.device),
        StepShape(global_batch, units, task.throughput_unit, is_queries=entry.task == "clicks"),
        sample_flops(entry, config.model, splits.info, config.train.activation_checkpointing),
        peak_flops(config.hardware, config.precision),
        (lambda: batches.num_unreadable) if batches is not None and config.data.on_error == "skip" else None,
    )


def summarise(context: RankContext, built: Built, result: LoopResult, wall_s: float) -> Summary:
    totals, unit = result.totals, built.trainee.task.throughput_unit
    last = totals.last
    assert last is not None  # train.steps is at least 1
    units_per_s = totals.rate_of_median_step(f"{unit}_per_s")
    assert units_per_s is not None
    return Summary(
        status=result.status,
        steps=result.steps,
        samples=int(last["samples"] or 0),
        world_size=context.world_size,
        sharding_factor=built.groups.sharding_factor,
        num_parameters=built.num_parameters,
        train_loss=float(last["loss"] if last["loss"] is not None else "nan"),
        evaluation=result.evaluation,
        best_eval_loss=result.best_eval_loss,
        unit=unit,
        units_per_s=units_per_s,
        step_s=totals.median_step_s,
        tflops_per_rank=totals.rate_of_median_step("tflops_per_rank"),
        mfu=totals.rate_of_median_step("mfu"),
        hfu=totals.rate_of_median_step("hfu"),
        train_s=totals.train_s,
        wall_s=wall_s,
        run_dir=str(context.run_dir),
        peak_memory=totals.peak_memory,
        sent_bytes=sum(sent.nbytes for sent in bytes_sent(built.trainee.model).values()),
        num_skipped=totals.num_skipped,
        num_unreadable=totals.num_unreadable,
    )


def leave_behind(summary: Summary, config: RecipeConfig, context: RankContext) -> None:
    """summary.json and loss.png, on rank 0."""
    if not context.is_main:
        return
    run_dir = Path(context.run_dir)
    summary.write(run_dir / "summary.json")
    draw_loss(run_dir / "metrics.jsonl", run_dir / "loss.png", config.run.name or config.model.kind)


def close_all(windows: tuple[StepWindow, ...], loggers: list[Logger], report: Report, summary: Summary | None) -> None:
    for window in windows:
        line = window.close()
        if line is not None:
            report.line(line)
    for logger in loggers:
        logger.close(None if summary is None else summary.as_json())
    report.close()


def opening_lines(config: RecipeConfig, info: DataInfo, built: Built) -> list[str]:
    """What is about to run, as it was really built."""
    samples = f"{info.num_train:,} training and {info.num_eval:,} held-out samples"
    return [
        f"data: {info.description or config.data.kind}; {samples}",
        f"model: {config.model.kind}, {built.num_parameters:,} parameters",
        *built.groups.lines(),
    ]
