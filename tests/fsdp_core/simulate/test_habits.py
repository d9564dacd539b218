"""What another engine's habits do to the tape of a step, counted by hand on two units of two matrices each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core.simulate import tape as t
from fsdp_core.simulate.habits import Habits
from fsdp_core.simulate.recording import Recorder

WIDTH, BATCH, RANKS = 1024, 4, 2
MATRIX = 4 * WIDTH * WIDTH  # bytes of one weight, and of one copy of its gradient


class Pair(nn.Module):
    """One unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def recorded(habits: Habits, steps: int = 2) -> t.Tape:
    """With a mark ``step`` before each step."""
    with Recorder() as recorder, habits.while_built(recorder):
        with torch.device("meta"):
            model = nn.Sequential(Pair(), Pair())
        fsdp_core.fully_shard(
            model,
            units=(Pair,),
            process_group=recorder.ranks(0, RANKS),
            gather_buffers="allocator",
            device=torch.device("meta"),
        )
        recorder.follow(model)
        habits.watch(model)
        recorder.begin_tape()
        for _ in range(steps):
            recorder.mark("step")
            model(torch.empty(BATCH, WIDTH, device="meta")).sum().backward()
            for parameter in model.parameters():
                parameter.grad = None
            habits.after_step(model)
        return recorder.end_tape()


def live(tape: t.Tape) -> list[tuple[t.Entry, dict[int, t.Alloc]]]:
    """Every entry, and what is alive behind it."""
    alive = {alloc.block: alloc for alloc in tape.held}
    found = []
    for entry in tape.entries:
        if isinstance(entry, t.Alloc):
            alive[entry.block] = entry
        elif isinstance(entry, t.Free):
            del alive[entry.block]
        found.append((entry, dict(alive)))
    return found


def nbytes_of(alive: dict[int, t.Alloc], what: str) -> int:
    return sum(alloc.nbytes for alloc in alive.values() if alloc.what == what)


def at_sources(tape: t.Tape) -> list[tuple[int, int]]:
    """(gradients as autograd has them, gathered weights) in matrices, whenever a unit's source is taken."""
    return [
        (
            sum(alloc.what == "mm" and alloc.nbytes == MATRIX for alloc in alive.values()),
            nbytes_of(alive, "engine.full") // MATRIX,
        )
        for entry, alive in live(tape)
        if isinstance(entry, t.Alloc) and entry.what == "engine.grad_full"
    ]


def test_gradients_come_one_by_one_or_are_concatenated_beside_their_weights() -> None:
    """By unit, the last one first. Of it the first gradient is copied while the weights of both units are there (the
    other is gathered ahead); concatenated, both its gradients wait."""
    assert at_sources(recorded(Habits(), steps=1)) == [(1, 4), (1, 2)]
    assert at_sources(recorded(Habits(concatenates_gradients=True), steps=1)) == [(2, 4), (2, 2)]


def test_concatenated_gradients_are_let_go_before_the_weights() -> None:
    for entry, alive in live(recorded(Habits(concatenates_gradients=True))):
        if isinstance(entry, t.Mark) and entry.kind == "free":
            assert not any(alloc.what == "mm" and alloc.nbytes == MATRIX for alloc in alive.values())


def test_gradients_are_kept_for_the_next_step_or_given_back() -> None:
    """Two shards of two matrices each, halved on two ranks."""

    def gradients(habits: Habits) -> list[int]:
        return [
            nbytes_of(alive, "engine.grad_shard")
            for entry, alive in live(recorded(habits))
            if isinstance(entry, t.Mark) and entry.kind == "step"
        ]

    assert gradients(Habits()) == [0, 2 * MATRIX]
    assert gradients(Habits(frees_gradients=True)) == [0, 0]


def test_an_output_is_kept_until_the_next_one_is_there() -> None:
    """In the middle of backward, and at the start of the next step; never two of them when a forward is over."""

    def outputs(habits: Habits) -> int:
        states = live(recorded(habits))
        begins = [index for index, (entry, _) in enumerate(states) if entry == t.Mark("step", "", "")]
        return sum(alloc.what == "mm" and alloc.nbytes == 4 * BATCH * WIDTH for alloc in states[begins[1]][1].values())

    assert (outputs(Habits()), outputs(Habits(keeps_output=True))) == (0, 1)


@pytest.mark.parametrize("concatenates", [False, True])
def test_nothing_of_a_step_is_left(concatenates: bool) -> None:
    tape = recorded(Habits(concatenates_gradients=concatenates, frees_gradients=True))
    held = sum(alloc.nbytes for alloc in tape.held)
    assert sum(alloc.nbytes for alloc in live(tape)[-1][1].values()) <= held + 100
