"""The one training loop: steps, log lines, evaluations, checkpoints, early stop. What a step is: ``recipes.step``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from recipes.boundary import Agreed, Boundary
from recipes.data.loading import EvalBatches
from recipes.data.records import Batch
from recipes.evaluate import CutShort, evaluate
from recipes.flight.recorder import EVALUATION, SAVING, TRAINING, FlightRecorder
from recipes.loggers import Logger
from recipes.loss_guard import LossGuard
from recipes.metrics.clock import StepClock
from recipes.metrics.early_stop import EarlyStop
from recipes.metrics.ledger import Ledger, Line, StepRecord
from recipes.metrics.memory import retry_hint
from recipes.metrics.totals import RunTotals
from recipes.report import Report
from recipes.saver import Saver
from recipes.schedulers import Schedule
from recipes.schema import RecipeConfig
from recipes.step import Trainee, train_step
from recipes.stop import StoppedFromOutside
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
    boundary: where ranks agree to stop or to save. saver: writes checkpoints.
    windows: told when a step begins and has ended (profiler, engine trace).
    totals: of the steps before ``first_step``, added to.

    A run that goes on gets back, by ``load_state_dict``, what the loop itself remembers from step to step.
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
    boundary: Boundary
    saver: Saver
    windows: tuple[StepWindow, ...] = ()
    first_step: int = 0
    totals: RunTotals = field(default_factory=RunTotals)

    def __post_init__(self) -> None:
        has_scaler = self.trainee.scaler.is_enabled()
        self.guard = LossGuard(self.config.train, has_scaler, self.trainee.ranks, self._say)
        self.early_stop = EarlyStop(self.config.train.early_stop)
        self._evaluation: dict[str, float] = {}
        self._is_evaluation_due = False

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON, the same on all ranks."""
        return {
            "evaluation": self._evaluation,
            "is_evaluation_due": self._is_evaluation_due,
            "early_stop": self.early_stop.state_dict(),
            "guard": self.guard.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._evaluation = dict(state["evaluation"])
        self._is_evaluation_due = state["is_evaluation_due"]
        self.early_stop.load_state_dict(state["early_stop"])
        self.guard.load_state_dict(state["guard"])

    def run(self) -> LoopResult:
        """Raises StoppedFromOutside, on every rank, after everything has been saved."""
        train = self.config.train
        self.report.begin_steps(self.first_step, train.steps)
        if self.boundary.before_the_first_step().stop:
            self._leave(self.first_step)
        done = self.first_step
        if self._is_evaluation_due and self.held_out is not None:
            self._evaluate(done, self.held_out)
        while done < train.steps and not self.early_stop.is_over:
            agreed = self._step(done)
            done += 1
            self._end_of_step(done, agreed)
        is_early = done < train.steps
        if is_early:
            num_bad = self.early_stop.num_bad
            self.report.line(f"stopping early after step {done}: no improvement in {num_bad} evaluations")
        with self.flight.during(SAVING):
            self.saver.finish(done, self._evaluation.get("loss"))
        status = "stopped_early" if is_early else "finished"
        return LoopResult(status, done, self.totals, self._evaluation, self.early_stop.lowest)

    def _step(self, step: int) -> Agreed:
        for window in self.windows:
            window.step_begins(step)
        self.flight.step = step + 1
        self.flight.event("data")
        self.clock.start()
        lr = self.lr(step)
        outcome = train_step(
            self.trainee, next(self.batches), lr, self.clock, self.boundary.wishes(), self.guard.veto(step + 1)
        )
        self.ledger.add(StepRecord(step + 1, lr, self.clock.finish(), outcome))
        self.report.step_done()
        for window in self.windows:
            self._say(window.step_ended(step))
        if step == self.first_step:
            self.flight.enter(TRAINING)
        return self.boundary.agree(outcome.wishes)

    def _end_of_step(self, done: int, agreed: Agreed) -> None:
        """``done`` steps are done: log, leave, evaluate, save, as each is due."""
        train = self.config.train
        is_last = done == train.steps
        must_leave = agreed.stop and not is_last
        must_evaluate = is_last or (train.eval_every is not None and done % train.eval_every == 0)
        must_save = agreed.save or self.saver.is_due(done)
        is_due = done == self.first_step + 1 or done % train.log_every == 0 or must_evaluate
        if is_due or must_leave or must_save or self.guard.must_stop:
            self._log()
        if must_leave:
            self._is_evaluation_due = must_evaluate  # there may be no time for it now; it is made up for
            self._leave(done)
        eval_loss = None
        if must_evaluate and self.held_out is not None:
            eval_loss = self._evaluate(done, self.held_out)["loss"]
        if must_save and not is_last:
            with self.flight.during(SAVING):
                self.saver.save(done, eval_loss)

    def _leave(self, done: int) -> NoReturn:
        """Every rank has agreed: save what is not saved yet, together, and leave together."""
        why = self.boundary.reason()
        with self.flight.during(SAVING):
            saved = self.saver.save_and_wait(done)
        self.report.line(f"stopped by {why} after step {done}: {saved}")
        raise StoppedFromOutside(why, done)

    def _log(self) -> None:
        """All steps since the last log, on every rank; the only place where the host waits for the device."""
        lines = self.ledger.flush()
        if not lines:
            return
        self._warn(self.totals.last, lines)
        for line in lines:
            self.totals.add(line)
            for logger in self.loggers:
                logger.log(int(line["step"] or 0), line)
        for logger in self.loggers:
            logger.flush()
        self.report.progress(lines, self.config.train.steps)
        self.guard.see(lines)

    def _evaluate(self, done: int, held_out: EvalBatches) -> dict[str, float]:
        trainee, is_over = self.trainee, self.boundary.is_evaluation_over
        self._is_evaluation_due = True  # until it is done: a signal may cut it short, and it is made up for
        try:
            with self.flight.during(EVALUATION):
                metrics = evaluate(trainee.model, trainee.task, held_out, trainee.ranks, is_over)
        except CutShort:
            self._leave(done)
        for logger in self.loggers:
            logger.log(done, {f"eval_{name}": value for name, value in metrics.items()})
            logger.flush()
        self._evaluation, self._is_evaluation_due = metrics, False
        self.early_stop.observe(metrics["loss"])
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
