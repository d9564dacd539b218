"""Whether configs fit a device: one plan for all whose memory is the same.

A learning rate, a seed or a number of steps changes no memory. Nor does a fourth micro-batch: the first finds no
gradients, those in the middle add to them, the last one reduces, and the peak of a step lies in one of the three.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass

from recipes.plan.advice import smaller
from recipes.plan.aside import in_one_line
from recipes.plan.machine import machine_for_memory
from recipes.plan.predict import predict
from recipes.plan.record import GivenUp, as_it_runs, record_run
from recipes.plan.recordings import key_of
from recipes.schema import RecipeConfig
from recipes.schema.derived import micro_batch, num_micro_batches

MOST_MICRO_BATCHES = 3
# Keys of our own optimizers that change numbers and no memory; a plugin's other keys count as if they did.
_UNSEEN = ("lr", "weight_decay", "no_decay", "betas", "eps", "beta2_decay")


@dataclass(frozen=True)
class Fit:
    """needed: reserved bytes of a rank if memory had no end; usable: what there is. does: also after giving back every
    unused segment. change: overrides that need less. unknown: why nothing is known; the rest means nothing then."""

    needed: int = 0
    usable: int = 0
    does: bool = True
    change: str = ""
    unknown: str = ""


class Fitting:
    """why_not: asked now and then; a text gives up the plan that is being made, which is then not known."""

    def __init__(self, why_not: Callable[[], str] = str) -> None:
        self._why_not = why_not
        self._found: dict[str, Fit] = {}

    def of(self, config: RecipeConfig, world_size: int, ranks_per_host: int) -> Fit:
        """Raises no Exception: what cannot be planned is ``unknown``."""
        key = memory_key(config, world_size, ranks_per_host)
        found = self._found.get(key)
        if found is None:
            found = self._planned(config, world_size, ranks_per_host)
            self._found[key] = found
        return found

    def _planned(self, config: RecipeConfig, world_size: int, ranks_per_host: int) -> Fit:
        if config.train.compile or config.sharding.cpu_offload:
            return Fit(unknown="train.compile and sharding.cpu_offload are not simulated")
        if why := self._why_not():
            return Fit(unknown=why)
        short = as_it_runs(shortened(config, world_size))
        try:
            recorded = record_run(short, world_size, ranks_per_host, why_not=self._why_not)
            plan = predict(short, recorded, machine_for_memory(config.hardware, ranks_per_host)).plan
        except GivenUp as given_up:
            return Fit(unknown=str(given_up))
        except Exception as error:  # a plugin's model may do what has no answer on a device without memory
            return Fit(unknown=in_one_line(error))
        change = "" if plan.fits else smaller(plan, config)
        return Fit(plan.memory.needed, plan.memory.usable, plan.fits, change)


def shortened(config: RecipeConfig, world_size: int) -> RecipeConfig:
    """The same memory with at most three micro-batches."""
    if num_micro_batches(config.train, world_size) <= MOST_MICRO_BATCHES:
        return config
    short = copy.deepcopy(config)
    short.train.micro_batch = micro_batch(config.train, world_size)
    short.train.global_batch = MOST_MICRO_BATCHES * short.train.micro_batch * world_size
    return short


def memory_key(config: RecipeConfig, world_size: int, ranks_per_host: int) -> str:
    """Equal for configs whose memory is the same."""
    short = as_it_runs(shortened(config, world_size))
    tree = json.loads(key_of(short, world_size, ranks_per_host))
    sections = tree[0]
    sections["train"]["micro_batch"] = micro_batch(short.train, world_size)
    for name in _UNSEEN:
        sections["optimizer"].pop(name, None)
    return json.dumps([tree, dataclasses.asdict(config.hardware)], sort_keys=True)
