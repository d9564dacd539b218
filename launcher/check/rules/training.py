"""Rules about precision, optimizer, schedule, evaluation, logging and the run's name."""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.check.about import About
from launcher.check.rules.rule import Rules
from launcher.errors import Problem
from launcher.schema import Config
from recipes.data.files import expanded
from recipes.schema.training import AdamWConfig, SGDConfig

RULES = Rules()
LOGGER_MODULES = {"wandb": ("wandb", "wandb"), "tensorboard": ("tensorboard", "fsdp-launcher[tensorboard]")}


@RULES.reading("precision")
def dtypes(config: Config, about: About) -> Iterator[Problem]:
    precision = config.precision
    if "float16" in (precision.param_dtype, precision.reduce_dtype) and not precision.grad_scaler:
        yield about.problem(
            "precision.grad_scaler",
            "float16 gradients underflow without a loss scaler",
            got="false",
            expected="true with float16",
            remedy="precision=fp16 (sets all of it), precision.grad_scaler=true, or precision=bf16",
            also=("precision.param_dtype", "precision.reduce_dtype"),
        )
    if precision.master_dtype not in ("float32", precision.param_dtype):
        yield about.problem(
            "precision.master_dtype",
            "weights kept in a 16-bit dtype are computed with in that dtype",
            got=precision.master_dtype,
            expected=f"float32, or precision.param_dtype ({precision.param_dtype})",
            remedy="precision.master_dtype=float32, or precision.param_dtype=bfloat16",
            also=("precision.param_dtype",),
        )


@RULES.reading("optimizer")
def optimizers(config: Config, about: About) -> Iterator[Problem]:
    optimizer = config.optimizer
    if isinstance(optimizer, SGDConfig) and optimizer.nesterov and optimizer.momentum == 0:
        yield about.problem(
            "optimizer.nesterov",
            "Nesterov's variant needs momentum",
            got="true",
            remedy="optimizer.momentum=0.9, or optimizer.nesterov=false",
            also=("optimizer.momentum",),
        )
    if isinstance(optimizer, AdamWConfig) and len(optimizer.betas) != 2:
        yield about.problem(
            "optimizer.betas",
            "AdamW has two moments",
            got=optimizer.betas,
            expected="two numbers, at least 0 and below 1",
            remedy="'optimizer.betas=[0.9,0.95]'",
        )


@RULES.reading("scheduler.warmup_steps", "train.steps")
def warmup(config: Config, about: About) -> Iterator[Problem]:
    if (config.scheduler.warmup_steps or 0) > config.train.steps:
        yield about.problem(
            "scheduler.warmup_steps",
            "the run ends before the warm-up does",
            got=config.scheduler.warmup_steps,
            expected=f"at most train.steps = {config.train.steps}",
            remedy=f"scheduler.warmup_steps={config.train.steps // 10}",
            also=("train.steps",),
        )


@RULES.reading("train.eval_every", "train.eval_samples", "data.eval_fraction")
def evaluation(config: Config, about: About) -> Iterator[Problem]:
    train = config.train
    if train.eval_samples and config.data.eval_fraction == 0:
        yield about.problem(
            "data.eval_fraction",
            "nothing is held out, but evaluations are asked for",
            got=config.data.eval_fraction,
            expected="above 0, or train.eval_samples=0",
            remedy="train.eval_samples=0 (no evaluation), or data.eval_fraction=0.02",
            also=("train.eval_samples",),
        )
    if train.eval_every is not None and not train.eval_samples:
        yield about.problem(
            "train.eval_every",
            "evaluations are asked for, with 0 samples each",
            got=train.eval_every,
            remedy="train.eval_samples=256, or train.eval_every=null",
            also=("train.eval_samples",),
        )


@RULES.reading("train.early_stop", "train.eval_every")
def early_stop(config: Config, about: About) -> Iterator[Problem]:
    if config.train.early_stop.patience is not None and config.train.eval_every is None:
        yield about.problem(
            "train.early_stop.patience",
            "early stopping counts evaluations, and there is only one at the end",
            got=config.train.early_stop.patience,
            expected="train.eval_every set as well",
            remedy=f"train.eval_every={max(1, config.train.steps // 10)}",
        )


@RULES.reading("train.profile_steps", "train.steps")
def profile(config: Config, about: About) -> Iterator[Problem]:
    span = config.train.profile_steps
    if span is None or (len(span) == 2 and 0 <= span[0] < span[1] <= config.train.steps):
        return
    yield about.problem(
        "train.profile_steps",
        "this is no span of steps of the run",
        got=span,
        expected=f"[first, last) with 0 <= first < last <= train.steps = {config.train.steps}",
        remedy="'train.profile_steps=[3,6]'",
        also=("train.steps",),
    )


@RULES.reading("logger")
def loggers(config: Config, about: About) -> Iterator[Problem]:
    for name, (module, package) in LOGGER_MODULES.items():
        if getattr(config.logger, name) is not None and not about.installed(module):
            yield about.problem(
                f"logger.{name}",
                f"the package {module} is not installed",
                remedy=f"pip install '{package}', or select other loggers: logger=[jsonl]",
            )


@RULES.reading("run")
def run_folder(config: Config, about: About) -> Iterator[Problem]:
    run = config.run
    if run.name is not None and (not run.name.strip() or re.search(r"^\.|[/\x00-\x1f]", run.name)):
        yield about.problem(
            "run.name",
            "the name becomes part of a folder's name",
            got=f"'{run.name}'",
            expected="text without '/' and line breaks that does not start with '.'",
            remedy="run.name=my_run",
        )
    if run.dir is not None and not run.dir.strip():
        yield about.problem(
            "run.dir",
            "the path is empty",
            got=f"'{run.dir}'",
            expected="a folder, or a new path",
            remedy="run.dir=PATH (is a shell variable empty?), or leave it out for a new folder under runs/",
        )
    elif run.dir is not None and expanded(run.dir).is_file():
        yield about.problem(
            "run.dir", "this is a file", got=run.dir, expected="a folder, or a new path", remedy="run.dir=null"
        )
