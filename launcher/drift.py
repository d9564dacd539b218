"""The drift guard: what a change of config means for a run that goes on from a checkpoint. Pure, no torch.

Every key is of one of three kinds:

=============  =====================================================================================================
safe           where it runs, how it is cut over ranks, what is logged: the run is the same run (up to rounding)
numbers        learning rate, seed, precision, data, ...: another run from here on; ``checkpoint.allow_drift=true``
incompatible   the model's shape, the optimizer's kind, the tokenizer: what was saved has no meaning in the new run
=============  =====================================================================================================

``train.steps`` (and what else only the schedule reads it for) is safe where the steps already done would have had the
same learning rates under the new value, as with a constant schedule, and changes numbers otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recipes.registry import MODELS
from recipes.schedulers import schedule
from recipes.schema.training import SchedulerConfig

SAFE, NUMBERS, INCOMPATIBLE = "safe", "numbers", "incompatible"
# The longest matching part of a key decides; keys of no group here (a plugin's own) change numbers.
KINDS = {
    "action": SAFE,
    "plugins": SAFE,
    "run": SAFE,
    "run.seed": NUMBERS,
    "model": INCOMPATIBLE,
    "model.provenance": SAFE,
    "model.init_from": SAFE,  # read before the first step only
    "model.use_cache": SAFE,
    "model.kernels": NUMBERS,  # other random numbers in dropout
    "model.dropout": NUMBERS,
    "model.table_lr": NUMBERS,
    "data": NUMBERS,
    "data.cache_dir": SAFE,
    "data.on_error": SAFE,
    "data.tokenizer": INCOMPATIBLE,
    "optimizer": NUMBERS,
    "optimizer.kind": INCOMPATIBLE,
    "optimizer.kernels": SAFE,  # the same update up to rounding, and the same state
    "scheduler": NUMBERS,
    "train": NUMBERS,
    "train.micro_batch": SAFE,
    "train.accumulate_with_communication": SAFE,
    "train.activation_checkpointing": SAFE,
    "train.compile": SAFE,
    "train.log_every": SAFE,
    "train.eval_every": SAFE,
    "train.eval_samples": SAFE,
    "train.early_stop": SAFE,
    "train.profile_steps": SAFE,
    "train.trace": SAFE,
    "precision": NUMBERS,
    "precision.master_dtype": INCOMPATIBLE,  # what was saved has that dtype
    "sharding": SAFE,
    "rate_limiter": SAFE,
    "cluster": SAFE,
    "logger": SAFE,
    "checkpoint": SAFE,
    "hardware": SAFE,
    "plan": SAFE,
    "calibrate": SAFE,
    "export": SAFE,
    "generate": SAFE,
    "inspect": SAFE,
    "tune": SAFE,
    "figure": SAFE,
    "sweep": SAFE,
}
_KINDS_OF_THEIR_OWN = ("model.kind", "data.kind", "optimizer.kind")  # each with its own dataclass of keys
# Never worth a line: they differ between any two starts of one run.
_UNTOLD = (
    "run.",
    "checkpoint.",
    "logger.",
    "cluster.",
    "sweep.",
    "hardware.",
    "plan.",
    "calibrate.",
    "export.",
    "generate.",
    "inspect.",
    "tune.",
    "figure.",
    "action",
    "plugins",
)


@dataclass(frozen=True)
class Difference:
    """One key whose value is another than the checkpoint's. kind: safe, numbers or incompatible."""

    key: str
    was: Any
    now: Any
    kind: str

    def __str__(self) -> str:
        return f"{self.key} {in_words(self.was)} -> {in_words(self.now)}"

    @property
    def is_told(self) -> bool:
        return self.kind != SAFE or not self.key.startswith(_UNTOLD)


def differences(was: Mapping[str, Any], now: Mapping[str, Any], steps_done: int) -> list[Difference]:
    """Between two plain config trees, in the new one's order. Keys that only one of them has are not compared:
    they belong to another version of this program. Nor are the keys of another model, optimizer or data source."""
    found = [
        Difference(key, old, new, _kind(key, was, now, steps_done))
        for key, old, new in _leaves(was, now, "")
        if old != new
    ]
    others = tuple(one.key.removesuffix("kind") for one in found if one.key in _KINDS_OF_THEIR_OWN)
    return [one for one in found if one.key in _KINDS_OF_THEIR_OWN or not one.key.startswith(others)]


def in_words(value: Any) -> str:
    """As it would be typed."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


def kind_of(key: str) -> str:
    """By the key alone."""
    parts = key.split(".")
    for count in range(len(parts), 0, -1):
        kind = KINDS.get(".".join(parts[:count]))
        if kind is not None:
            return kind
    return NUMBERS


def _kind(key: str, was: Mapping[str, Any], now: Mapping[str, Any], steps_done: int) -> str:
    if key == "train.steps" and _same_rates(was, now, steps_done):
        return SAFE
    entry = MODELS.get(str(now.get("model", {}).get("kind")))
    if key.startswith("model.") and key != "model.kind" and entry is not None and entry.module is None:
        return NUMBERS  # only its author knows what a plugin's key means; shapes are compared when they are loaded
    return kind_of(key)


def _same_rates(was: Mapping[str, Any], now: Mapping[str, Any], steps_done: int) -> bool:
    """Whether the steps done would have had the same learning rates with the new number of steps."""
    old = schedule(SchedulerConfig(**was["scheduler"]), 1.0, was["train"]["steps"])
    new = schedule(SchedulerConfig(**now["scheduler"]), 1.0, now["train"]["steps"])
    return all(old(step) == new(step) for step in range(min(steps_done, was["train"]["steps"])))


def _leaves(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for name, new in now.items():
        if name not in was:
            continue
        old, key = was[name], f"{prefix}{name}"
        if isinstance(new, Mapping) and isinstance(old, Mapping):
            yield from _leaves(old, new, f"{key}.")
        else:
            yield key, _plain(old), _plain(new)


def _plain(value: Any) -> Any:
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
