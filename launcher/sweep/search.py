"""A search: jobs are chosen one after the other, each from the results so far. The record is the only memory.

Choices and results are read back from the jobs' records, so a search goes on where it was stopped; jobs without a
result are run first. A failed job is a choice that gave nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from launcher.announce import say, short
from launcher.check.about import is_installed
from launcher.command_line import parse
from launcher.compose import Composer
from launcher.errors import EXIT_OK, ConfigErrors, Problem
from launcher.provenance import HIDDEN
from launcher.sweep import folder, states
from launcher.sweep.chosen import backend_of
from launcher.sweep.drive import drive
from launcher.sweep.fitting import Guard, in_words
from launcher.sweep.folder import Sweep
from launcher.sweep.measures import LOSS, default_metric
from launcher.sweep.plan import Planned, plan_one
from launcher.sweep.record import Job
from launcher.sweep.settle import settle
from launcher.sweep.space import Dimension, Value, dimensions_of, with_values
from launcher.sweep.start import asked_of, gone_again, is_still_to_be_made, opened

_MOST_IN_VAIN = 50  # choices in a row that are on record already, or cannot be composed


def start_search(composer: Composer, arguments: Sequence[str]) -> int:
    """A new search, or one that goes on; returns the exit code. ``action=check`` only checks it.

    Raises:
        ConfigErrors: nothing to search, optuna is not installed, a choice cannot run, or the folder is not usable.
    """
    space, first = _checked(composer)
    action = first.config.action
    if action == "check":
        print(f"ok: a search of {first.asked.trials} jobs over {', '.join(dimension.key for dimension in space)}")
        return EXIT_OK
    if action != "train":
        what, expected = "a search looks at results, so its jobs train", "train, or check, which starts nothing"
        raise ConfigErrors(
            [Problem(what, "action", action, expected=expected, remedy="leave hydra/sweeper out: a grid")]
        )
    is_new = is_still_to_be_made(first.asked)
    sweep = opened(asked_of(composer, first, arguments), first.asked, [])
    with gone_again(sweep) if is_new else nullcontext():
        return _search(composer, sweep, space, first)


def resume_search(sweep: Sweep, plugins: Sequence[str], max_parallel: int | None) -> int:
    """``sweep.do=resume``: its command is composed again, in the folder where it was typed.

    plugins: as typed now, the same files as then. max_parallel: as typed now, if it was.
    """
    command = [word for word in sweep.asked.command[1:] if not word.startswith("plugins=")]
    wrong = ""
    if os.getcwd() != sweep.asked.cwd:
        wrong = "the search goes on where it was started, as its presets and paths are looked up from there"
    elif any(HIDDEN in word for word in command):
        wrong = "the search's command has secrets, which are not stored"
    if wrong:
        again = f"cd {sweep.asked.cwd}; type the search's command again with sweep.dir={sweep.path}"
        raise ConfigErrors([Problem(wrong, "sweep.do", "resume", remedy=again)])
    words = [f"sweep.dir={sweep.path}", *([f"plugins=[{','.join(plugins)}]"] if plugins else [])]
    words += [f"sweep.max_parallel={max_parallel}"] if max_parallel else []
    composer = Composer(parse([*command, *words]))
    space, first = _checked(composer)
    return _search(composer, sweep, space, first)


def _search(composer: Composer, sweep: Sweep, space: Sequence[Dimension], first: Planned) -> int:
    with folder.locked(sweep):
        settle(sweep)
        guard = Guard(first.asked.refuse_oom)
        feed = Search(composer, sweep, space, first.asked.max_parallel, first.asked.trials, guard)
        say(f"sweep folder: {short(sweep.path)}\n{feed.describe()}", sys.stdout)
        return drive(sweep, backend_of(sweep, first.config.plugins, first.asked.max_parallel), feed)


class Search:
    """The feed of a search (``drive.Feed``)."""

    def __init__(
        self,
        composer: Composer,
        sweep: Sweep,
        space: Sequence[Dimension],
        max_parallel: int,
        trials: int,
        guard: Guard,
    ) -> None:
        jobs, asked = sweep.jobs(), sweep.asked
        self._composer, self._sweep, self._space = composer, sweep, list(space)
        self._max_parallel, self._trials = max_parallel, trials
        self._by_hash = {job.content_hash: job for job in jobs}
        self._again = [job for job in jobs if job.state in states.MISSING]
        self._trial_of: dict[int, int] = {}
        self._planned: dict[tuple[Value, ...], tuple[Planned | None, list[Problem]]] = {}
        self._guard = guard
        self._is_over = False
        ended = [job.end for job in jobs if job.end is not None]
        self._columns: dict[str, float] = {name: value for end in ended for name, value in end.measures.items()}
        self._chooser: Any = import_module("launcher.sweep.optuna_search").Chooser(
            space,
            sampler=asked.sampler,
            seed=asked.sampler_seed,
            is_small_good=asked.direction == "minimize",
            num_before=len(jobs),
        )
        for job in jobs:
            if job not in self._again:
                self._chooser.learn(job.params, self._value(job))

    def describe(self) -> str:
        done = len(self._by_hash) - len(self._again)
        return f"a search of {self._trials} jobs over {len(self._space)} keys, {done} of them on record"

    def more(self, num_open: int) -> list[Job]:
        jobs: list[Job] = []
        while len(jobs) + num_open < self._max_parallel and (job := self._next()) is not None:
            jobs.append(job)
        return jobs

    def ended(self, job: Job) -> None:
        self._by_hash[job.content_hash] = job
        value = self._value(job)
        self._chooser.tell(self._trial_of.pop(job.number), value)
        if value is None and job.state == states.DONE and not (self._is_over or self._has_diverged(job)):
            say("the search ends: a job is done and has nothing to be compared by")
            self._is_over = True

    def _next(self) -> Job | None:
        if self._again:
            job = self._again.pop(0)
            self._trial_of[job.number], _ = self._chooser.choose(again=job.params)
            return job
        if self._is_over:
            return None
        for _ in range(_MOST_IN_VAIN):
            if len(self._by_hash) >= self._trials:
                return None
            trial, values = self._chooser.choose()
            planned, problems = self._plan(values)
            if planned is None:
                say(f"passed over: {_words(values)}: {problems[0].key}: {problems[0].what}")
                self._chooser.tell(trial, None)
            elif (known := self._by_hash.get(planned.content_hash)) is not None:
                self._chooser.tell(trial, self._value(known))
            elif self._cannot_fit(planned, values):
                self._chooser.tell(trial, None)
            else:
                job = self._sweep.add(planned, 1 + max((job.number for job in self._by_hash.values()), default=-1))
                self._by_hash[job.content_hash] = job
                self._trial_of[job.number] = trial
                return job
        say(f"the search ends: its last {_MOST_IN_VAIN} choices were on record already, or cannot run")
        self._is_over = True
        return None

    def _cannot_fit(self, planned: Planned, values: Mapping[str, Value]) -> bool:
        """Whether it is passed over because of its memory (``sweep.refuse_oom``); told either way."""
        fit = self._guard.fit_of(planned.config)
        if fit is None or fit.does:
            return False
        verb = "passed over" if self._guard.refuses else "does not fit by its plan"
        say(f"{verb}: {_words(values)}: {in_words(fit)}")
        return self._guard.refuses

    def _plan(self, values: Mapping[str, Value]) -> tuple[Planned | None, list[Problem]]:
        key = tuple(values.values())
        if key not in self._planned:  # a small space gives the same choice often
            self._planned[key] = plan_with(self._composer, self._space, values)
        return self._planned[key]

    def _value(self, job: Job) -> float | None:
        if job.state != states.DONE or job.end is None:
            return None
        return job.end.measures.get(self._sweep.asked.metric or self._usual_metric(job.end.measures))

    def _usual_metric(self, measures: Mapping[str, float]) -> str:
        """One column for the whole search: a job whose evaluation gave no number is not compared by another one."""
        self._columns.update(measures)
        return default_metric(self._columns)

    def _has_diverged(self, job: Job) -> bool:
        """Its metric is no number in this job, as other jobs or its own steps show: a choice that gave nothing."""
        assert job.end is not None
        metric = self._sweep.asked.metric or default_metric(self._columns)
        return metric in self._columns or ("steps" in job.end.measures and LOSS not in job.end.measures)


def plan_with(
    composer: Composer, space: Sequence[Dimension], values: Mapping[str, Value]
) -> tuple[Planned | None, list[Problem]]:
    overrides = with_values(composer.words.overrides, values)
    return plan_one(composer, overrides, [dimension.key for dimension in space], values)


def _checked(composer: Composer) -> tuple[list[Dimension], Planned]:
    """The space, and its first job. Every choice of every list is checked, the other keys at their first value."""
    space, problems = dimensions_of(composer.words.overrides, composer.loader.hydra.config_loader)
    if not problems and not space:
        remedy = "optimizer.lr='tag(log, interval(1e-4, 1e-2))'"
        problems.append(Problem("there is nothing to search: no key has several values", remedy=remedy))
    if not is_installed("optuna"):
        remedy = "pip install 'fsdp-launcher[optuna]'"
        problems.append(Problem("the search needs the package optuna", "hydra/sweeper", "optuna", remedy=remedy))
    if problems:
        raise ConfigErrors(problems)
    base = {dimension.key: dimension.first() for dimension in space}
    corners = [base, *({**base, d.key: choice} for d in space for choice in d.choices[1:])]
    corners += [{**base, d.key: d.number(d.high)} for d in space if not d.choices]
    jobs: list[Planned] = []
    for corner in corners:
        job, found = plan_with(composer, space, corner)
        problems.extend(problem for problem in found if problem not in problems)
        if job is not None:
            jobs.append(job)
    if problems:
        raise ConfigErrors(problems)
    return space, jobs[0]


def _words(values: Mapping[str, Value]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())
