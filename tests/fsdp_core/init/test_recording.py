"""The plan: which recorded operations a storage needs. Integers only."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fsdp_core.errors import InitError
from fsdp_core.init.recording import CLONE_LIMIT_BYTES, Constant, Node, Recording, Slot, TensorRef

CPU = torch.device("cpu")


def ref(slot: Slot, size: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,), offset: int = 0) -> TensorRef:
    return TensorRef(slot, torch.float32, size, stride, offset)


class Script:
    """Writes nodes by hand: ``make``, ``write`` (partly) and ``fill`` (completely)."""

    def __init__(self) -> None:
        self.recording = Recording()

    def _node(self, reads: tuple[Slot, ...], writes: tuple[Slot, ...], overwrites: Slot | None) -> None:
        self.recording.append(
            Node(
                op=torch.ops.aten.zero_.default,
                args=(),
                kwargs={},
                reads=reads,
                writes=writes,
                made=(),
                overwrites=overwrites,
                is_blank=False,
                seed=None,
                is_composite=False,
                default_dtype=torch.float32,
            )
        )

    def make(self, *reads: Slot) -> Slot:
        slot = self.recording.new_slot(16, CPU)
        self._node(reads, (slot,), slot)
        return slot

    def write(self, *slots: Slot, reads: tuple[Slot, ...] = ()) -> None:
        self._node(reads, slots, None)

    def fill(self, slot: Slot, *reads: Slot) -> None:
        self._node(reads, (slot,), slot)


def test_only_what_is_needed() -> None:
    script = Script()
    a, b = script.make(), script.make()  # nodes 0, 1
    script.write(a)
    script.write(b)
    script.write(a)
    assert script.recording.plan([a]) == [0, 2, 4]
    assert script.recording.plan([b]) == [1, 3]
    assert script.recording.plan([b, a]) == [1, 3, 0, 2, 4]


def test_what_is_overwritten_is_not_run() -> None:
    script = Script()
    a = script.make()
    script.write(a)
    script.fill(a)  # node 2
    script.write(a)
    assert script.recording.plan([a]) == [2, 3]


def test_a_read_sees_the_values_of_its_time() -> None:
    script = Script()
    a = script.make()
    script.write(a)
    b = script.make(a)  # node 2 reads a
    script.fill(a)
    script.write(a)
    assert script.recording.plan([b]) == [0, 1, 2]
    assert script.recording.plan([a]) == [3, 4]
    assert script.recording.plan([a, b]) == [0, 1, 2, 3, 4]


def test_a_chain_of_reads_is_followed() -> None:
    script = Script()
    a = script.make()
    b = script.make(a)
    c = script.make(b)
    script.write(a, reads=(c,))  # later: not needed for c
    assert script.recording.plan([c]) == [0, 1, 2]
    assert script.recording.plan([a]) == [0, 1, 2, 3]


def test_an_operation_that_writes_two_storages_needs_both_before_it() -> None:
    script = Script()
    a, b = script.make(), script.make()
    script.write(b)
    script.write(a, b)  # node 3
    script.write(b)
    assert script.recording.plan([a]) == [0, 1, 2, 3]


def test_a_chain_needs_two_links_at_a_time() -> None:
    script = Script()
    links = [script.make() for _ in range(4)]  # nodes 0..3
    for before, link in pairwise(links):
        script.write(link, reads=(before,))  # nodes 4..6
    assert script.recording.plan([links[3]]) == [0, 1, 4, 2, 5, 3, 6]


def test_a_read_comes_before_a_later_write() -> None:
    script = Script()
    a = script.make()  # 0
    b = script.make(a)  # 1
    script.write(a)  # 2
    script.write(b)  # 3
    assert script.recording.plan([a, b]) == [0, 1, 2, 3]


def test_a_storage_nobody_wrote_needs_nothing() -> None:
    recording = Recording()
    assert recording.plan([recording.new_slot(8, CPU)]) == []


def test_last_uses() -> None:
    script = Script()
    a = script.make()
    b = script.make(a)
    script.write(b)
    assert script.recording.last_uses([0, 1, 2]) == {a: 1, b: 2}


@pytest.mark.parametrize(
    ("size", "stride", "offset", "covers"),
    [
        ((4,), (1,), 0, True),
        ((2, 2), (2, 1), 0, True),
        ((2, 2), (1, 2), 0, True),
        ((1, 4), (9, 1), 0, True),
        ((4,), (0,), 0, False),
        ((2,), (2,), 0, False),
        ((3,), (1,), 1, False),
        ((2, 2), (1, 1), 0, False),
    ],
)
def test_covers_slot(size: tuple[int, ...], stride: tuple[int, ...], offset: int, covers: bool) -> None:
    slot = Recording().new_slot(16, CPU)
    assert ref(slot, size, stride, offset).covers_slot() is covers


def test_small_constants_are_copied() -> None:
    tensor = torch.ones(3)
    constant = Constant(tensor)
    tensor.zero_()
    assert constant.tensor().tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.zero_(),
        lambda t: t.data.zero_(),
        lambda t: t.numpy().__setitem__(0, 7.0),
        lambda t: t[::2].add_(1),
    ],
    ids=["in_place", "data", "numpy", "through_a_view"],
)
def test_large_constants_are_referred_to_and_checked(change) -> None:
    tensor = torch.ones(CLONE_LIMIT_BYTES // 4 + 1)
    constant = Constant(tensor)
    assert constant.tensor().data_ptr() == tensor.data_ptr()
    change(tensor)
    with pytest.raises(InitError, match="changed after it was read"):
        constant.tensor()


def test_a_frozen_constant_no_longer_follows() -> None:
    tensor = torch.ones(CLONE_LIMIT_BYTES // 4 + 1)
    constant = Constant(tensor)
    assert constant.shares_memory_with(tensor[5:])
    constant.freeze()
    tensor.zero_()
    assert constant.tensor()[0] == 1
