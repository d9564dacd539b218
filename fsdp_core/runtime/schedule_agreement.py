"""The schedule check of a step, on all ranks together: each reads its own log, then their orders are compared.

What one rank finds, every rank raises, so that none is left waiting in a later collective.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fsdp_core.comm.wire import Label, Wire
from fsdp_core.errors import MismatchError, StateError
from fsdp_core.trace.events import Event
from fsdp_core.trace.schedule_check import check_schedule, first_difference

if TYPE_CHECKING:
    from fsdp_core.runtime.context import Context

_LABEL = Label(-1, "state", "schedule check")
_COLLECTIVE = ("gather", "reduce")  # what all ranks must do in the same order
_SHOWN = 3  # problems of one rank in a message


def verify(context: Context, events: Sequence[Event]) -> None:
    """Collective. Raises on all ranks if one broke a rule (``StateError``) or orders differ (``MismatchError``)."""
    wire = context.root.groups.world
    limit = context.limiter.max_inflight if context.limiter.limit.kind == "fixed" else None
    problems = check_schedule(events, max_inflight=limit)
    order = [event for event in events if event.kind in _COLLECTIVE]
    digest = hashlib.blake2b(repr([event.row for event in order]).encode(), digest_size=7).digest()
    numbers = [len(problems), int.from_bytes(digest, "little"), -int.from_bytes(digest, "little")]
    most = torch.tensor(numbers, dtype=torch.int64, device=wire.device)
    wire.all_reduce(most, _LABEL, "max").wait()
    num_problems, highest, lowest_negated = most.tolist()
    if num_problems:
        _raise_problems(wire, problems)
    if highest != -lowest_negated:
        logs = [[Event(kind, unit) for kind, unit in rows] for rows in _exchange(wire, [event.row for event in order])]
        raise MismatchError(
            "The ranks ran their units in different orders.",
            expected="the same gathers and reductions in the same order on every rank",
            got=first_difference(logs, _COLLECTIVE),
            remedy="check that no rank takes another path through the model",
        )


def _raise_problems(wire: Wire, problems: list[str]) -> None:
    of_rank = {rank: texts for rank, texts in enumerate(_exchange(wire, problems)) if texts}
    raise StateError(
        "The engine's schedule broke a rule.",
        expected="gathered before use, freed after it, written only between steps, never more in flight than asked",
        got="; ".join(f"rank {rank}: {text}" for rank, texts in of_rank.items() for text in texts[:_SHOWN]),
        remedy="no setting should be able to cause this: please report it with the event log of the step",
    )


def _exchange(wire: Wire, value: object) -> list[list]:
    """A JSON value of every rank, in rank order."""
    raw = json.dumps(value).encode()
    most = torch.tensor([len(raw)], dtype=torch.int64, device=wire.device)
    wire.all_reduce(most, _LABEL, "max").wait()
    width = int(most.item())
    mine = torch.tensor(list(raw.ljust(width)), dtype=torch.uint8, device=wire.device)
    whole = torch.empty(width * wire.group_size, dtype=torch.uint8, device=wire.device)
    wire.all_gather(whole, mine, _LABEL).wait()
    wire.quiesce()
    return [json.loads(bytes(part.tolist())) for part in whole.chunk(wire.group_size)]
