"""A run's plan beside what happened: made on rank 0 once everything is trained, saved and told.

Nothing is done for it before the first step or during one but to read the wires' counters around the first two. The
plan is made in a copy of the process (``aside``), as a model of the user's may do anything on a device without memory,
also wait for ranks that are not there. Whatever goes wrong with it is a line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fsdp_core import HeldBytes, bytes_sent, held_bytes
from fsdp_core.simulate import tape as t
from recipes.context import RankContext
from recipes.data.records import DataInfo
from recipes.plan.answer import as_json
from recipes.plan.aside import NoAnswer, answer_of
from recipes.plan.compared import FILE, Beside, Compared
from recipes.plan.machine import machine_for_memory
from recipes.plan.predict import predict
from recipes.plan.record import RecordedRun, as_it_runs, record_run
from recipes.plan.result import Plan
from recipes.plan.traffic import traffic_of
from recipes.schema import RecipeConfig
from recipes.schema.derived import unknown_to_plan
from recipes.step import Trainee
from recipes.windows import StepWindow

LONGEST_S = 30.0  # longer ones are for action=plan: the other ranks wait
_TELL_EVERY_S = 0.5


@dataclass(frozen=True)
class Happened:
    """What was measured of a run, on rank 0 where not said otherwise.

    step_s: the median step. peak_memory: as in the summary, the largest of all ranks.
    held, optimizer_bytes: the engine's ledger, and tensors of the optimizers' state, at the end.
    sent: bytes of one step by primitive; empty if no step was run.
    """

    step_s: float
    peak_memory: dict[str, int]
    held: HeldBytes
    optimizer_bytes: int
    sent: dict[str, int] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """By the names of a comparison."""
        found = {} if math.isnan(self.step_s) else {"step_s": self.step_s}
        found |= {name.removeprefix("peak_"): value for name, value in self.peak_memory.items()}
        found |= {"parameters_bytes": self.held.shards, "gradients_bytes": self.held.gradients}
        found |= {"optimizer_bytes": self.optimizer_bytes, "engine_bytes": self.held.peak}
        return found | _sent_numbers(self.sent)


class SentInOneStep(StepWindow):
    """Counts what this rank sends for the model in the second step of this start, or in the first if it is alone."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._num_seen = 0
        self._before: dict[str, int] = {}
        self.sent: dict[str, int] = {}

    def step_begins(self, step: int) -> None:
        if self._num_seen < 2:
            self._before = self._now()

    def step_ended(self, step: int) -> str | None:
        if self._num_seen < 2:
            self.sent = {name: nbytes - self._before.get(name, 0) for name, nbytes in self._now().items()}
            self._num_seen += 1
        return None

    def close(self) -> str | None:
        return None

    def _now(self) -> dict[str, int]:
        return {name: sent.nbytes for name, sent in bytes_sent(self._model).items()}


def happened(trainee: Trainee, step_s: float, peak_memory: dict[str, int], sent: dict[str, int]) -> Happened:
    """The model and its optimizers as they are after the last step."""
    return Happened(step_s, peak_memory, held_bytes(trainee.model), _optimizer_bytes(trainee), sent)


def leave_plan(
    config: RecipeConfig,
    context: RankContext,
    info: DataInfo,
    wire: str,
    measured: Happened,
    seconds: float = LONGEST_S,
) -> Beside:
    """Plans the run, compares, writes plan.json into the run folder. Raises no Exception: a note says what is wrong.

    wire: of the sharding groups.
    """
    if why := _not_simulated(config):
        return Beside(notes=(why,))
    try:
        found = answer_of(lambda: planned(config, context, info, wire), seconds, _Patience(context, seconds))
        beside = compare(found["numbers"], measured.numbers(), found["notes"])
        text = json.dumps(found["plan"] | {"run": beside.as_json()}, indent=2)
        (Path(context.run_dir) / FILE).write_text(text + "\n", encoding="utf-8")
    except NoAnswer as why:
        return Beside(notes=(f"none could be made: {why}",))
    except Exception as error:  # the run is over and well: a comparison may not change that
        return Beside(notes=(f"none could be made: {type(error).__name__}: {error}",))
    return beside


def planned(config: RecipeConfig, context: RankContext, info: DataInfo, wire: str) -> dict[str, Any]:
    """The plan as ``action=plan`` writes it, its numbers by the names of a comparison, and notes. Plain JSON."""
    device, world, per_host = context.device.partition(":")[0], context.world_size, context.local_world_size
    config, shares_memory = as_it_runs(config), wire == "shared_memory"
    recorded = record_run(config, world, per_host, is_inline=device == "cpu", shares_memory=shares_memory, info=info)
    plan = predict(config, recorded, machine_for_memory(config.hardware, per_host)).plan
    why_no_time = _why_no_time(config, device, world, per_host)
    if why_no_time:
        plan = dataclasses.replace(plan, rates=None, advice=())
    elif plan.rates is None:
        why_no_time = "no step time: by the plan memory runs out"
    numbers = numbers_of(plan, recorded, device, knows_order=not _knows_too_little(config, world, per_host))
    return {"plan": as_json(plan), "numbers": numbers, "notes": [why_no_time] if why_no_time else []}


def numbers_of(plan: Plan, recorded: RecordedRun, device: str, knows_order: bool) -> dict[str, float]:
    """device: cpu or cuda. knows_order: how events of host and device follow each other is known."""
    kinds, memory = plan.memory.peak_by_kind, plan.memory
    found: dict[str, float] = {} if plan.rates is None else {"step_s": plan.time.step_s}
    if device == "cuda":
        found["allocated_bytes"] = memory.allocated
        if knows_order:
            found |= {"active_bytes": memory.active, "reserved_bytes": memory.reserved}
    found |= {f"{kind}_bytes": kinds.get(kind, 0) for kind in ("parameters", "gradients", "optimizer")}
    found["engine_bytes"] = recorded.held.peak
    collectives = [one for one in recorded.tape.entries[recorded.last_step :] if isinstance(one, t.Collective)]
    # The comparison of ranks at the end of backward is not among what the wires count.
    rows = traffic_of([one for one in collectives if one.phase != "quiesce"], recorded.local_world_size).rows
    sent: dict[str, int] = {}
    for row in rows:
        sent[row.primitive] = sent.get(row.primitive, 0) + row.nbytes
    return found | _sent_numbers(sent)


def compare(predicted: dict[str, float], measured: dict[str, float], notes: list[str]) -> Beside:
    """Rows for everything that both know, in the plan's order."""
    rows = [Compared(name, value, measured[name]) for name, value in predicted.items() if name in measured]
    return Beside(tuple(rows), tuple(notes))


class _Patience:
    """Why nobody should wait for a plan any more; asked while somebody does. Tells those who watch for hangs that this
    rank is alive: the others wait for it."""

    def __init__(self, context: RankContext, seconds: float) -> None:
        self._context, self._seconds = context, seconds
        self._told_at = 0.0

    def __call__(self) -> str:
        stop, now = self._context.stop, time.monotonic()
        if stop.why is not None:
            return f"the run was asked to leave ({stop.why})"
        if stop.ends_at is not None and now > stop.ends_at - self._seconds:
            return "the time limit is near"
        if now > self._told_at + _TELL_EVERY_S:
            self._context.flight.event("progress", "planning the run")
            self._told_at = now
        return ""


def _not_simulated(config: RecipeConfig) -> str:
    if config.train.compile:
        return "none: what a compiler fuses is not simulated (train.compile)"
    if config.sharding.cpu_offload:
        return "none: copies between host and device are not simulated (sharding.cpu_offload)"
    return ""


def _knows_too_little(config: RecipeConfig, world_size: int, ranks_per_host: int) -> bool:
    return bool(unknown_to_plan(config.hardware, world_size, ranks_per_host))


def _why_no_time(config: RecipeConfig, device: str, world_size: int, ranks_per_host: int) -> str:
    """Empty where the profile knows the machine that ran."""
    profile = config.hardware
    if _knows_too_little(config, world_size, ranks_per_host):
        return f"no step time: hardware={profile.name} knows too little; action=calibrate measures a machine"
    if profile.device not in (None, device):
        return f"no step time: hardware={profile.name} is a {profile.device} device, and this ran on {device}"
    return ""


def _sent_numbers(sent: dict[str, int]) -> dict[str, float]:
    each = {f"{name}_bytes": float(nbytes) for name, nbytes in sent.items() if nbytes}
    return {"sent_bytes": float(sum(sent.values())), **each} if sent else {}


def _optimizer_bytes(trainee: Trainee) -> int:
    """Tensors of the optimizers' state, by storage."""
    storages: dict[int, int] = {}
    for optimizer in trainee.optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    storage = value.untyped_storage()
                    storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
