"""optuna behind three calls. Its study lives in memory; what happened is on record in the sweep's folder.

Imported by name where a search is asked for: optuna is an extra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import TrialState, create_trial

from launcher.sweep.space import Dimension, Value

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Chooser:
    """Chooses values, and learns what they gave. ``num_before``: choices made in earlier sessions of this search."""

    def __init__(
        self, space: Sequence[Dimension], *, sampler: str, seed: int, is_small_good: bool, num_before: int = 0
    ) -> None:
        self._distributions = {dimension.key: _distribution(dimension) for dimension in space}
        self._study = optuna.create_study(
            sampler=_sampler(sampler, seed + num_before), direction="minimize" if is_small_good else "maximize"
        )

    def learn(self, params: Mapping[str, Value], value: float | None) -> None:
        """A finished job of an earlier session; None: it failed. One outside of today's limits teaches nothing."""
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        try:
            trial = create_trial(state=state, value=value, params=dict(params), distributions=self._distributions)
        except ValueError:
            return
        self._study.add_trial(trial)

    def choose(self, again: Mapping[str, Value] | None = None) -> tuple[int, dict[str, Value]]:
        """(a number to tell the result by, values by key). again: take these, which have no result yet."""
        if again is not None:
            self._study.enqueue_trial(dict(again))
        trial = self._study.ask(self._distributions)
        return trial.number, dict(trial.params)

    def tell(self, number: int, value: float | None) -> None:
        """None: it failed."""
        self._study.tell(number, value, state=TrialState.FAIL if value is None else TrialState.COMPLETE)


def _distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.choices:
        return CategoricalDistribution(dimension.choices)
    if dimension.is_int:
        return IntDistribution(
            int(dimension.low), int(dimension.high), log=dimension.is_log, step=int(dimension.step or 1)
        )
    return FloatDistribution(dimension.low, dimension.high, log=dimension.is_log, step=dimension.step)


def _sampler(name: str, seed: int) -> BaseSampler:
    return RandomSampler(seed=seed) if name == "random" else TPESampler(seed=seed)
