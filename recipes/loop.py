"""The one training loop: steps, log lines, evaluations, early stop. What a step is: ``recipes.step``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from recipes.data.loading import EvalBatches
from recipes.data.records import Batch
from recipes.evaluate import evaluate
from recipes.flight.recorder import EVALUATION, TRAINING, FlightRecorder
from recipes.loggers import Logger
from recipes.loss_guard import LossGuard
from recipes.metrics.clock import StepClock
from recipes.metrics.early_stop import EarlyStop
from recipes.metrics.ledger import Ledger, Line, StepRecord
from recipes.metrics.memory import retry_hint
from recipes.metrics.totals import RunTotals
from recipes.report import Report
from recipes.schedulers import Schedule
from recipes.schema import RecipeConfig
from recipes.step import Trainee, train_step
from recipes.windows import StepWindow


@dataclass
class LoopResult:
    """status: ``finished`` or ``stopped_early``. evaluation: of the last evaluation, empty without one."""

    status: str
    steps: int
    totals: RunTotals
    evaluation: dict[str, float] = field(default_factory=dict)
    best_eval_loss: float | None = None


@dataclass
class Loop:
    """Runs steps [first_step, config.train.steps). Every rank runs it; only rank 0 has loggers and a report.

    batches: endless, one list of this rank's micro-batches per step. held_out: None for no evaluation.
    windows: told when a step begins and has ended (profiler, engine trace).
    """

    config: RecipeConfig
    trainee: Trainee
    batches: Iterator[list[Batch]]
    held_out: EvalBatches | None
    lr: Schedule
    clock: StepClock
    ledger: Ledger
    loggers: list[Logger]
    report: Report
    windows: tuple[StepWindow, ...] = ()
    first_step: int = 0

    def __post_init__(self) -> None:
        has_scaler = self.trainee.scaler.is_enabled()
        self.guard = LossGuard(self.config.train, has_scaler, self.trainee.ranks, self._say)

    def run(self) -> LoopResult:
        train = self.config.train
        early_stop = EarlyStop(train.early_stop)
        result = LoopResult("finished", self.first_step, RunTotals())
        self.report.begin_steps(self.first_step, train.steps)
        for step in range(self.first_step, train.steps):
            self._step(step)
            done = result.steps = step + 1
            is_last = done == train.steps
            should_evaluate = is_last or (train.eval_every is not None and done % train.eval_every == 0)
            is_due = is_last or should_evaluate or step == self.first_step or done % train.log_every == 0
            if is_due or self.guard.must_stop:
                self._log(result.totals)
            if should_evaluate and self.held_out is not None:
                result.evaluation = self._evaluate(done, self.held_out)
                must_stop = early_stop.observe(result.evaluation["loss"])
                result.best_eval_loss = early_stop.lowest
                if must_stop and not is_last:
                    self.report.line(
                        f"stopping early after step {done}: no improvement in {early_stop.num_bad} evaluations"
                    )
                    result.status = "stopped_early"
                    break
        return result

    def _step(self, step: int) -> None:
        for window in self.windows:
            window.step_begins(step)
        self.flight.step = step + 1
        self.flight.event("data")
        self.clock.start()
        lr = self.lr(step)
        outcome = train_step(self.trainee, next(self.batches), lr, self.clock, self.guard.veto(step + 1))
        self.ledger.add(StepRecord(step + 1, lr, self.clock.finish(), outcome))
        self.report.step_done()
        for window in self.windows:
            self._say(window.step_ended(step))
        if step == self.first_step:
            self.flight.enter(TRAINING)

    def _log(self, totals: RunTotals) -> None:
        """All steps since the last log, on every rank; the only place where the host waits for the device."""
        lines = self.ledger.flush()
        if not lines:
            return
        self._warn(totals.last, lines)
        for line in lines:
            totals.add(line)
            for logger in self.loggers:
                logger.log(int(line["step"] or 0), line)
        for logger in self.loggers:
            logger.flush()
        self.report.progress(lines, self.config.train.steps)
        self.guard.see(lines)

    def _evaluate(self, done: int, held_out: EvalBatches) -> dict[str, float]:
        with self.flight.during(EVALUATION):
            metrics = evaluate(self.trainee.model, self.trainee.task, held_out, self.trainee.ranks)
        for logger in self.loggers:
            logger.log(done, {f"eval_{name}": value for name, value in metrics.items()})
            logger.flush()
        shown = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())
        self.report.line(f"held-out after step {done}: {shown}")
        return metrics

    def _warn(self, before: Line | None, lines: list[Line]) -> None:
        limiter = self.config.rate_limiter
        retries = int((before or {}).get("num_alloc_retries") or 0)
        self._say(retry_hint(retries, int(lines[-1].get("num_alloc_retries") or 0), limiter.max_inflight, limiter.kind))

    @property
    def flight(self) -> FlightRecorder:
        return self.trainee.ranks.flight

    def _say(self, text: str | None) -> None:
        if text is not None:
            self.report.line(text)
