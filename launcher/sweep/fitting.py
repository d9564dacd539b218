"""Jobs that cannot fit into the memory of their devices are found before any is started (``sweep.refuse_oom``).

Each job is planned, as ``action=plan`` does it, for memory alone; jobs that differ in what no memory sees (learning
rate, seed, steps) share one plan. Nothing is planned, and no torch loaded, where the hardware's memory is not known.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from launcher.announce import say
from launcher.schema import Config
from launcher.sweep.plan import Planned
from recipes.amounts import gb

MOST_S = 60.0  # of planning where nobody asked for it
_TELL_EVERY_S = 10.0


class Guard:
    """refuse_oom: as in ``SweepConfig``: true refuses, null warns, false does not look."""

    def __init__(self, refuse_oom: bool | None) -> None:
        self.refuses, self._looks = refuse_oom is True, refuse_oom is not False
        self._give_up_at = None if self.refuses else time.monotonic() + MOST_S
        self._fitting: Any = None

    def fit_of(self, config: Config) -> Any:
        """``recipes.plan.fitting.Fit``; None where nobody looks, or the hardware's memory is not known."""
        if not self.looks_at(config):
            return None
        if self._fitting is None:
            fitting = import_module("recipes.plan.fitting")  # by name and now: it imports torch
            self._fitting = fitting.Fitting(self._why_not)
        cluster = config.cluster
        return self._fitting.of(config, cluster.num_nodes * cluster.nproc_per_node, cluster.nproc_per_node)

    def looks_at(self, config: Config) -> bool:
        return self._looks and knows_memory(config)

    def _why_not(self) -> str:
        if self._give_up_at is not None and time.monotonic() > self._give_up_at:
            return f"{MOST_S:.0f} s of planning are over; sweep.refuse_oom=true takes the time for all"
        return ""


def knows_memory(config: Config) -> bool:
    return config.hardware.memory_bytes is not None or config.hardware.usable_memory_bytes is not None


def may_start(jobs: Sequence[Planned], refuse_oom: bool | None) -> bool:
    """Whether these jobs may be started. Tells what does not fit, and what it could not look at."""
    guard = Guard(refuse_oom)
    if guard.refuses and not all(knows_memory(job.config) for job in jobs):
        names = ", ".join(sorted({job.config.hardware.name for job in jobs if not knows_memory(job.config)}))
        say(f"sweep.refuse_oom: the memory of hardware={names} is not known, so its jobs are not refused")
    fits = _fits(guard, jobs)
    unknown = {fit.unknown: number for number, fit in reversed(fits.items()) if fit.unknown}
    for why, number in unknown.items():
        count = sum(fit.unknown == why for fit in fits.values())
        which = f"job {number}" if count == 1 else f"{count} jobs, the first of them job {number},"
        say(f"whether {which} can fit is not known: {why}")
    too_large = {number: fit for number, fit in fits.items() if not fit.does}
    if not too_large:
        return True
    verb = "refused, nothing is started" if guard.refuses else "started all the same; sweep.refuse_oom=true refuses"
    say(f"{len(too_large)} of {len(jobs)} jobs do not fit by their plans ({verb}):")
    for number, fit in too_large.items():
        say(f"  {line_of(number, jobs[number], fit)}")
    return not guard.refuses


def line_of(number: int, job: Planned, fit: Any) -> str:
    """Which job, how much it is over, what to change."""
    words = " ".join(f"{key}={value}" for key, value in job.swept.items())
    return f"job {number} {words}: {in_words(fit)}; try {fit.change}"


def in_words(fit: Any) -> str:
    over = fit.needed - fit.usable
    return f"{gb(fit.needed)} needed, {gb(fit.usable)} usable, {gb(over)} too much"


def _fits(guard: Guard, jobs: Sequence[Planned]) -> dict[int, Any]:
    """By job, those that could be looked at, with progress for people."""
    found: dict[int, Any] = {}
    is_live, tell_at = sys.stderr.isatty(), time.monotonic() + _TELL_EVERY_S
    for number, job in enumerate(jobs):
        if is_live and guard.looks_at(job.config):
            print(f"\rplanning the memory of job {number + 1} of {len(jobs)} ", end="", file=sys.stderr, flush=True)
        elif time.monotonic() > tell_at:
            say(f"planning the memory of job {number + 1} of {len(jobs)}")
            tell_at = time.monotonic() + _TELL_EVERY_S
        fit = guard.fit_of(job.config)
        if fit is not None:
            found[number] = fit
    if is_live and found:
        print(file=sys.stderr)
    return found
