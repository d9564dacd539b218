"""``run``: one recipe on one rank, from a checked config to a summary. Start reading here.

kernels -> samples (prepare) -> model, shards, optimizer (build) -> a checkpoint, if there is one (resume) -> seeds ->
steps (loop, step), checkpoints (saver) -> summary, picture, plan
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

from fsdp_core import bytes_sent
from recipes.boundary import Boundary
from recipes.build import Built, build_trainee
from recipes.checkpoint.checkpointer import Checkpointer
from recipes.checkpoint.folder import checkpoints_of
from recipes.context import RankContext
from recipes.data.loading import TrainBatches
from recipes.data.records import DataInfo, Splits
from recipes.flight.recorder import CLOSING
from recipes.loggers import Logger, open_loggers
from recipes.loggers.base import FROM_THE_BEGINNING
from recipes.loggers.jsonl import read_lines
from recipes.loggers.select import without_secrets
from recipes.loop import Loop, LoopResult
from recipes.loss_picture import draw_loss
from recipes.metrics.clock import step_clock
from recipes.metrics.flops import peak_flops, sample_flops
from recipes.metrics.ledger import Ledger, Line, StepShape
from recipes.metrics.memory import memory_meter
from recipes.metrics.totals import RunTotals
from recipes.plan.of_run import SentInOneStep, happened, leave_plan
from recipes.prepare import eval_batches, prepare_splits, train_batches
from recipes.ranks import Ranks
from recipes.registry import MODELS
from recipes.report import Report
from recipes.resume import Resumed, restore, resume, resumed_lines, with_the_same_batch
from recipes.run_state import LimiterPart, Part, ScalerPart
from recipes.saver import Saver
from recipes.schedulers import schedule
from recipes.schema import RecipeConfig
from recipes.seeds import choose_kernels, seed_training
from recipes.summary import Summary
from recipes.windows import StepWindow, windows_of


def run(config: RecipeConfig, context: RankContext) -> Summary:
    """Train as ``config`` says; called by every rank of the run, with the default process group made when W > 1.

    Goes on from the newest whole checkpoint of the run folder, or of ``checkpoint.resume``, if there is one.
    Leaves in ``context.run_dir`` (rank 0): metrics.jsonl, summary.json, loss.png, plan.json, and what the config asks
    for.

    Raises:
        StoppedFromOutside: ``context.stop`` asked for it; what was trained is saved, on every rank alike.
        Whatever goes wrong, on the rank where it does; ending the others is the launcher's part.
    """
    started = time.perf_counter()
    ranks, report = Ranks.of(context), Report.of(context)
    choose_kernels(config.run)
    context.flight.event("progress", "preparing data")
    splits = prepare_splits(config, ranks, report)
    context.flight.event("progress", "building the model")
    built = build_trainee(config, context, ranks, splits.info)
    checkpointer = Checkpointer(
        checkpoints_of(Path(context.run_dir)),
        built.trainee,
        ranks,
        config.checkpoint,
        attempt=context.attempt,
        config_tree=without_secrets(config),
        say=report.line,
    )
    for line in opening_lines(config, splits.info, built):
        report.line(line)
    resumed = resume(config, context, ranks, checkpointer, report)
    if resumed is not None:
        config, batch_line = with_the_same_batch(config, resumed, ranks.world_size)
        for line in resumed_lines(resumed, ranks.world_size, batch_line):
            report.line(line)
    result = train(config, context, ranks, splits, built, report, checkpointer, resumed, started)
    report.line(result.text())
    return result


def train(
    config: RecipeConfig,
    context: RankContext,
    ranks: Ranks,
    splits: Splits,
    built: Built,
    report: Report,
    checkpointer: Checkpointer,
    resumed: Resumed | None,
    started: float,
) -> Summary:
    """The loop and what it leaves behind; closes everything it opened, whatever happens."""
    loggers = open_loggers(config, context, FROM_THE_BEGINNING if resumed is None else resumed.start)
    counter = SentInOneStep(built.trainee.model)
    windows = (counter, *windows_of(config.train, context, built.trainee.model))
    summary: Summary | None = None
    try:
        with train_batches(config, splits, ranks) as batches:
            parts: dict[str, Part] = {
                "data": batches,
                "scaler": ScalerPart(built.trainee.scaler),
                "limiter": LimiterPart(built.trainee.model),
            }
            first_step = 0 if resumed is None else resumed.state.step
            saver = Saver(config.checkpoint, checkpointer, ranks, Path(context.run_dir), parts, first_step)
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
                boundary=Boundary(ranks, context.stop, saver.is_due_by_clock, lambda: saver.save_s),
                saver=saver,
                windows=windows,
                first_step=first_step,
            )
            parts["loop"] = loop
            seed_training(config.run, context.rank)
            if resumed is not None:
                loop.totals = totals_so_far(context, ranks)
                restore(resumed, parts, config, context, report)
                loop.ledger.begin_at(first_step, batches.num_taken)
            result = loop.run()
        context.flight.enter(CLOSING)
        summary = summarise(context, built, result, time.perf_counter() - started)
        leave_behind(summary, config, context)
        if config.run.plan and context.is_main:
            summary = beside_its_plan(summary, config, context, splits.info, built, counter)
    finally:
        close_all(windows, loggers, report, summary)
    return summary


def totals_so_far(context: RankContext, ranks: Ranks) -> RunTotals:
    """Of the steps before this start, from rank 0's metrics.jsonl, the same on every rank. Collective."""
    lines = read_lines(Path(context.run_dir) / "metrics.jsonl") if ranks.is_main else []
    return RunTotals.from_json(ranks.tell(RunTotals.of(lines).as_json()))


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
    last: Line = totals.last or {}  # empty where nothing was left to do and the metrics are gone
    units_per_s = totals.rate_of_median_step(f"{unit}_per_s")
    return Summary(
        status=result.status,
        steps=result.steps,
        samples=int(last.get("samples") or 0),
        world_size=context.world_size,
        sharding_factor=built.groups.sharding_factor,
        num_parameters=built.num_parameters,
        train_loss=math.nan if last.get("loss") is None else float(last["loss"] or 0.0),
        evaluation=result.evaluation,
        best_eval_loss=result.best_eval_loss,
        unit=unit,
        units_per_s=math.nan if units_per_s is None else units_per_s,
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
        num_overflowed=totals.num_overflowed,
    )


def leave_behind(summary: Summary, config: RecipeConfig, context: RankContext) -> None:
    """summary.json and loss.png, on rank 0."""
    if not context.is_main:
        return
    run_dir = Path(context.run_dir)
    summary.write(run_dir / "summary.json")
    draw_loss(run_dir / "metrics.jsonl", run_dir / "loss.png", config.run.name or config.model.kind)


def beside_its_plan(
    summary: Summary, config: RecipeConfig, context: RankContext, info: DataInfo, built: Built, counter: SentInOneStep
) -> Summary:
    """The summary with the plan of what it sums up; written again, beside plan.json. The other ranks wait."""
    measured = happened(built.trainee, summary.step_s, summary.peak_memory, counter.sent)
    wire = built.groups.report.groups[0].shard_wire
    summary = replace(summary, plan=leave_plan(config, context, info, wire, measured))
    summary.write(Path(context.run_dir) / "summary.json")
    return summary


def close_all(windows: tuple[StepWindow, ...], loggers: list[Logger], report: Report, summary: Summary | None) -> None:
    for window in windows:
        line = window.close()
        if line is not None:
            report.line(line)
    for logger in loggers:
        logger.close(None if summary is None else summary.as_json())
    report.close()


def parameter_counts(built: Built) -> str:
    """What the engine shards, and what lies in tables beside it."""
    sharded = built.groups.report.num_parameters
    tables = built.num_parameters - sharded
    return f"{sharded:,} parameters" + (f" and {tables:,} in tables of their own" if tables else "")


def opening_lines(config: RecipeConfig, info: DataInfo, built: Built) -> list[str]:
    """What is about to run, as it was really built."""
    samples = f"{info.num_train:,} training and {info.num_eval:,} held-out samples"
    return [
        f"data: {info.description or config.data.kind}; {samples}",
        f"model: {config.model.kind}, {parameter_counts(built)}",
        *built.groups.lines(),
        *(["blocks are compiled in the first step, which may take minutes"] if config.train.compile else []),
    ]
