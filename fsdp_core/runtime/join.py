"""Training when ranks have different numbers of batches.

A sharded step is collective: a rank that stops early would leave the others waiting. Here every rank runs as many
steps as the longest has batches; one that has run out repeats its last batch with weight 0, so that its collectives
and its optimizer step take place and its gradients are zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from fsdp_core.comm.wire import Label, Wire
from fsdp_core.errors import MismatchError

T = TypeVar("T")
_LABEL = Label(-1, "join", "join")


def joined(wire: Wire, batches: Iterable[T]) -> Iterator[tuple[T, float]]:
    """(batch, weight) until no rank has a batch left. Weight 1, or 0 for a repeated batch."""
    source = iter(batches)
    last: list[T] = []
    while True:
        try:
            batch, has_batch = next(source), True
            last = [batch]
        except StopIteration:
            has_batch = False
        any_left = torch.tensor([int(has_batch)], dtype=torch.int64, device=wire.device)
        wire.all_reduce(any_left, _LABEL, "max").wait()
        if not int(any_left.item()):
            return
        if not last:
            raise MismatchError(
                "A rank has no batch at all, so there is nothing it could repeat while the others train.",
                expected="at least one batch on every rank",
                got="none on this rank",
            )
        yield last[0], 1.0 if has_batch else 0.0
