"""Ids to the ranks that hold the rows, rows back: the all-to-alls of sharded embeddings.

The only file of the model that names ``torch.distributed``. All ranks of the default process group must call these
functions together and equally often; how many lookups each brings may differ, and may be zero. A plan lets ranks that
exist on paper take the group's place (``stand_in``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Route:
    """One forward's traffic, remembered for its backward. U distinct rows are wanted here, R by others from here.

    position: [lookups], which of the U rows each lookup reads.
    slots: [R], the slots that were asked of this rank, by asking rank.
    num_sent, num_asked: of the U and of the R, how many go to (come from) each rank.
    """

    position: Tensor
    slots: Tensor
    num_sent: tuple[int, ...]
    num_asked: tuple[int, ...]


@dataclass(frozen=True)
class PaperWorld:
    """Ranks without a process group. all_to_all: told of the tensors that would be received and sent."""

    rank: int
    world_size: int
    all_to_all: Callable[[Tensor, Tensor], None]


_on_paper: list[PaperWorld] = []


@contextmanager
def stand_in(paper: PaperWorld) -> Iterator[None]:
    """Inside, tables belong to ``paper``'s ranks and nothing is sent."""
    _on_paper.append(paper)
    try:
        yield
    finally:
        _on_paper.pop()


def world() -> tuple[int, int]:
    """(rank, world size) of the default process group; (0, 1) without one."""
    if _on_paper:
        return _on_paper[-1].rank, _on_paper[-1].world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def plan_route(owner: Tensor, slot: Tensor, num_slots: int, world_size: int, is_valid: Tensor) -> Route | None:
    """Agree on who sends what: one small all-to-all of counts, one of slots.

    owner, slot: [lookups], where each lookup's row lies. num_slots: more than any slot of any rank. A row wanted
    several times is sent once. is_valid: 0-dim bool; None is returned *on every rank* if it is false on any: an error
    on one rank must not leave the others waiting. On CUDA the host waits for the device twice here, for the number of
    distinct rows and for the counts, and nowhere else in the model.
    """
    wanted, position = torch.unique(owner * num_slots + slot, return_inverse=True)  # sorted: by owner, then slot
    first_of_rank = torch.arange(world_size + 1, device=wanted.device) * num_slots
    sent = torch.searchsorted(wanted, first_of_rank).diff()  # bincount would make the host wait once more
    header = torch.stack((sent, (~is_valid).to(sent.dtype).expand_as(sent)), dim=1)  # [W, 2]: count, complaint
    answer = torch.zeros_like(header)
    _all_to_all(answer, header)
    counts = torch.cat((sent, answer[:, 0], answer[:, 1])).tolist()
    num_sent, num_asked, complaints = (tuple(counts[i * world_size : (i + 1) * world_size]) for i in range(3))
    if any(complaints):
        return None
    slots = wanted.new_empty(sum(num_asked))
    _all_to_all(slots, wanted % num_slots, num_asked, num_sent)
    return Route(position, slots, num_sent, num_asked)


def expected_route(num_lookups: int, world_size: int, device: torch.device) -> Route:
    """On paper: every lookup wants a row of its own (the most there can be), and all ranks are asked alike."""
    each = -(-num_lookups // world_size)
    counts = (each,) * world_size
    slots = torch.empty(each * world_size, dtype=torch.int64, device=device)
    header = torch.empty(world_size, 2, dtype=torch.int64, device=device)
    _all_to_all(torch.empty_like(header), header)
    _all_to_all(slots, torch.empty_like(slots), counts, counts)
    return Route(torch.empty(num_lookups, dtype=torch.int64, device=device), slots, counts, counts)


def deliver(route: Route, rows: Tensor) -> Tensor:
    """``rows`` [R, dim], read for the others, to [U, dim], what this rank had asked for."""
    return _all_to_all_rows(rows, route.num_asked, route.num_sent)


def give_back(route: Route, rows: Tensor) -> Tensor:
    """The way back: ``rows`` [U, dim] (gradients) to the ranks that own them, [R, dim]."""
    return _all_to_all_rows(rows, route.num_sent, route.num_asked)


def _all_to_all_rows(rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...]) -> Tensor:
    received = rows.new_empty(sum(receive), rows.shape[1])
    # As bytes: the transports move any dtype that way, and gloo does not know all of them.
    source, target = rows.contiguous().view(torch.uint8), received.view(torch.uint8)
    _all_to_all(target, source, receive, send)
    return received


def _all_to_all(
    target: Tensor, source: Tensor, receive: Sequence[int] | None = None, send: Sequence[int] | None = None
) -> None:
    """receive, send: rows of each rank; None: equally many. Tensors without memory are sent nowhere."""
    if _on_paper:
        _on_paper[-1].all_to_all(target, source)
    if target.is_meta:
        return
    dist.all_to_all_single(
        target, source, None if receive is None else list(receive), None if send is None else list(send)
    )
