"""A search over what decides memory and speed: F, RAF, units, micro-batch, recomputation, limiter, for one machine.

One knob at a time until none helps any more: plans are cheap but not free (seconds). Knobs that trade memory against
each other would block one another that way, so the climb begins anew from each combination of ``COUPLED``. Runs that
retry or do not fit never win.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from recipes.amounts import gb
from recipes.plan.machine import machine_of
from recipes.plan.predict import predict
from recipes.plan.recordings import Recordings
from recipes.plan.result import Plan
from recipes.plan.table import HEADER, aligned, row_of
from recipes.registry import MODELS
from recipes.schema import RecipeConfig
from recipes.schema.derived import divisors, micro_batch, sharding_factor

COUPLED = ("train.activation_checkpointing", "sharding.factor")
MOST_ACCUMULATED = 8  # micro-batches of a step that are worth the time it takes to record them
Choice = tuple[tuple[str, Any], ...]  # (dotted key, value), one for each knob
Planner = Callable[[RecipeConfig], Plan]


@dataclass(frozen=True)
class Tried:
    """One point of the search: overrides and what they give."""

    choice: Choice
    plan: Plan

    @property
    def is_sound(self) -> bool:
        return self.plan.rates is not None

    @property
    def samples_per_s(self) -> float:
        return 0.0 if self.plan.rates is None else self.plan.rates.samples_per_s

    def score(self, objective: str) -> tuple[float, float]:
        """Larger is better. Among those that do not go through, the one that needs least memory."""
        if not self.is_sound:
            return (float("-inf"), -float(self.plan.memory.needed))
        return (self.samples_per_s if objective == "throughput" else -self.plan.time.step_s, 0.0)


def knobs_of(config: RecipeConfig, world_size: int, ranks_per_host: int) -> dict[str, list[Any]]:
    """Values worth trying, by key."""
    per_rank = config.train.global_batch // world_size
    factors = {sharding_factor(config.sharding, world_size, ranks_per_host), world_size}
    if world_size % ranks_per_host == 0:
        factors.add(ranks_per_host)
    units = ["blocks", "root"] if MODELS[config.model.kind].offers("unit_classes") else [config.sharding.units]
    return {
        "train.activation_checkpointing": [False, True],
        "train.micro_batch": [size for size in divisors(per_rank) if per_rank // size <= MOST_ACCUMULATED],
        "sharding.factor": sorted(factors),
        "sharding.reshard_after_forward": [True, False],
        "rate_limiter.max_inflight": [2, 3],
        "sharding.units": units,
    }


class Search:
    """objective: ``throughput`` (samples/s at the config's global batch) or ``latency`` (the shortest step, one
    micro-batch long: the global batch is W micro-batches). report: told of every plan that is made."""

    def __init__(
        self, config: RecipeConfig, planner: Planner, world_size: int, objective: str, report: Callable[[Tried], None]
    ) -> None:
        self._config, self._planner, self._world_size = config, planner, world_size
        self._objective, self._report = objective, report
        self.tried: dict[Choice, Tried] = {}

    def run(self, knobs: dict[str, list[Any]], most: int) -> Tried:
        """The best of at most ``most`` plans."""
        own = {key: _value(self._config, key) for key in knobs}
        own["train.micro_batch"] = micro_batch(self._config.train, self._world_size)
        own["sharding.factor"] = own["sharding.factor"] or max(knobs["sharding.factor"])
        best = self._try(own)
        for values in product(*(knobs[key] for key in COUPLED)):
            if len(self.tried) < most:
                start = self._try({**own, **dict(zip(COUPLED, values, strict=True))})
                best = max(best, self._climb(start, knobs, most), key=self._score)
        return best

    def _climb(self, best: Tried, knobs: dict[str, list[Any]], most: int) -> Tried:
        """One knob at a time, until none helps."""
        improved = True
        while improved:
            improved = False
            for key, values in knobs.items():
                for value in values:
                    if len(self.tried) >= most:
                        return best
                    found = self._try({**dict(best.choice), key: value})
                    if self._score(found) > self._score(best):
                        best, improved = found, True
        return best

    def _score(self, one: Tried) -> tuple[float, float]:
        return one.score(self._objective)

    def _try(self, values: dict[str, Any]) -> Tried:
        choice = tuple(values.items())
        if choice not in self.tried:
            found = Tried(choice, self._planner(self._changed(values)))
            self.tried[choice] = found
            self._report(found)
        return self.tried[choice]

    def _changed(self, values: dict[str, Any]) -> RecipeConfig:
        config = copy.deepcopy(self._config)
        for key, value in values.items():
            section, _, name = key.partition(".")
            setattr(getattr(config, section), name, value)
        if self._objective == "latency":
            config.train.global_batch = values["train.micro_batch"] * self._world_size
        return config

    def front(self) -> list[Tried]:
        """Plans that no other one beats in both memory and speed, the fastest first."""
        fastest_first = sorted(filter(lambda one: one.is_sound, self.tried.values()), key=self._order, reverse=True)
        front: list[Tried] = []
        for one in fastest_first:
            if not front or one.plan.memory.needed < front[-1].plan.memory.needed:
                front.append(one)
        return front

    def _order(self, one: Tried) -> tuple[float, int]:
        return self._score(one)[0], -one.plan.memory.needed


def planner_for(config: RecipeConfig, world_size: int, ranks_per_host: int) -> Planner:
    """Plans on the config's own hardware."""
    machine, recordings = machine_of(config.hardware, ranks_per_host, world_size), Recordings()
    return lambda changed: predict(changed, recordings.of(changed, world_size, ranks_per_host), machine).plan


def table_of(tried: Sequence[Tried]) -> str:
    """One row a plan: what is set, what it gives."""
    names = tuple(key.rpartition(".")[2] for key, _ in tried[0].choice)
    rows = [(*names, *HEADER[5:])]
    rows += [(*(_text(value) for _, value in one.choice), *row_of(one.plan)[5:]) for one in tried]
    return aligned(rows)


def overrides_of(best: Tried, config: RecipeConfig, world_size: int, objective: str) -> str:
    """The words to add to the command line: what differs from the config."""
    words = [f"{key}={_text(value)}" for key, value in best.choice if value != _value(config, key)]
    if objective == "latency":
        words.append(f"train.global_batch={dict(best.choice)['train.micro_batch'] * world_size}")
    return " ".join(words) or "(nothing: the config is the best that was found)"


def reasons(best: Tried, start: Tried) -> Iterator[str]:
    """Why the best is better than where the search began."""
    if not start.is_sound:
        yield "the config itself does not go through without retries"
    elif best.samples_per_s > start.samples_per_s:
        yield f"{100 * (best.samples_per_s / start.samples_per_s - 1):.2g} % more samples/s than the config itself"
    before, after = start.plan.memory.needed, best.plan.memory.needed
    if before != after:
        yield f"{gb(abs(after - before))} {'more' if after > before else 'less'} memory"
    waited = best.plan.time.exposed_s / best.plan.time.step_s
    yield f"{100 * waited:.0f} % of its step waits for communication"


def _value(config: RecipeConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
