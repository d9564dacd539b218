"""The recording: which operations made or wrote which storage. Records and integers only; nothing here runs anything.

A recording follows *storages*, not tensors. Each storage of the build is a ``Slot``; a tensor is a slot and a geometry
(``TensorRef``). Views therefore need no entry at all, an in-place operation through a view is a write to the slot,
and ``p.data = q`` only moves p to another slot. To have a slot as it stood at some point means to run the nodes that
wrote it before that point, and before them whatever those read, in program order: ``plan``.

Time is the index of a node. Spans are half-open: "before n" excludes node n.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp_core.errors import InitError

CLONE_LIMIT_BYTES = 1 << 20
"""Constants up to this size are copied into the recording; larger ones are referred to and checked at replay."""


@dataclass(eq=False, slots=True)
class Slot:
    """One storage of the build.

    index: its place in the recording.
    nbytes: size in bytes.
    device: where the build believes it lies.
    build: which call of deferred_init made it.
    writers: nodes that write it, ascending; the first one made it.
    label: the module attribute it was first registered under, for messages.
    delivered: real tensors that were handed out for it.
    """

    index: int
    nbytes: int
    device: torch.device
    build: int
    writers: list[int] = field(default_factory=list)
    label: str | None = None
    delivered: list[weakref.ref[Tensor]] = field(default_factory=list)


@dataclass(frozen=True, eq=False, slots=True)
class TensorRef:
    """A tensor of the build: a slot seen through a geometry. Size, stride and offset are in elements of ``dtype``."""

    slot: Slot
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False

    def covers_slot(self) -> bool:
        """True if every byte of the slot belongs to exactly one element."""
        numel = 1
        for extent in self.size:
            numel *= extent
        if self.offset != 0 or numel * self.dtype.itemsize != self.slot.nbytes:
            return False
        expected = 1
        for stride, extent in sorted(zip(self.stride, self.size, strict=True)):
            if extent != 1:
                if stride != expected:
                    return False
                expected *= extent
        return True


class Constant:
    """A real tensor that a recorded operation reads.

    A small one is copied. A large one is referred to, with a checksum: who changes it before the replay gets an error
    (a write during the build is seen in time, and copies it first).
    """

    __slots__ = ("_checksum", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._checksum: int | None = None
        self._version: int | None = None
        tensor = tensor.detach()
        if tensor.numel() * tensor.itemsize <= CLONE_LIMIT_BYTES or tensor.device.type == "meta":
            self._tensor = tensor.clone()
        else:
            self._tensor = tensor
            self._checksum = _checksum(tensor)
            self._version = None if tensor.is_inference() else tensor._version

    @property
    def digest(self) -> int | None:
        """A number of its values, ``None`` where that would cost a copy."""
        return self._checksum if self._checksum is not None else _checksum(self._tensor)

    @property
    def is_reference(self) -> bool:
        return self._checksum is not None or self._version is not None

    def shares_memory_with(self, tensor: Tensor) -> bool:
        return self.is_reference and self._tensor.untyped_storage()._cdata == tensor.untyped_storage()._cdata

    def freeze(self) -> None:
        """Copy the values now: somebody is about to write them."""
        self._tensor, self._checksum, self._version = self._tensor.clone(), None, None

    def tensor(self) -> Tensor:
        """The values as they were when recorded.

        Raises:
            InitError: somebody changed them since.
        """
        moved = self._version is not None and self._tensor._version != self._version
        if moved or (self._checksum is not None and _checksum(self._tensor) != self._checksum):
            raise InitError(
                "A tensor that the recording reads was changed after it was read",
                expected=f"the values of the {tuple(self._tensor.shape)} {self._tensor.dtype} tensor at recording time",
                got="other values",
                remedy="leave the tensor alone until the model is materialised, or pass a copy of it to the build",
            )
        return self._tensor


def _checksum(tensor: Tensor) -> int | None:
    """CRC of a dense CPU tensor's bytes, without copying them; None where that cannot be had."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    num_bytes = tensor.numel() * tensor.itemsize
    return zlib.crc32((ctypes.c_char * num_bytes).from_address(tensor.data_ptr()))


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One recorded operation.

    op: the operation, or a Python function for a composite call.
    args, kwargs: its arguments, with ``TensorRef`` and ``Constant`` in place of tensors.
    reads: slots whose earlier contents it needs. writes: slots it changes (those it makes included).
    made: (position among the flattened outputs, reference) of each storage it makes.
    overwrites: a slot it writes completely without reading it.
    is_blank: it only allocates (the values are zeros in a seeded build).
    seed: for random operations. is_composite: ``op`` is a Python function that draws below ``seed``.
    default_dtype: torch's default when recorded, which factories without a dtype use.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    made: tuple[tuple[int, TensorRef], ...]
    overwrites: Slot | None
    is_blank: bool
    seed: int | None
    is_composite: bool
    default_dtype: torch.dtype

    @property
    def name(self) -> str:
        return getattr(self.op, "__name__", str(self.op)) if self.is_composite else str(self.op)


@dataclass(frozen=True)
class HostDraw:
    """A value that came from random numbers and was used while recording: it binds the build to a device type."""

    build: int
    operation: str
    parameter: str | None
    device_type: str


class Recording:
    """Nodes in program order and the slots they write; of one build, or of several that may share tensors."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.constants: list[Constant] = []
        self.host_draws: list[HostDraw] = []
        self.num_builds = 0
        self._num_slots = 0

    def new_slot(self, nbytes: int, device: torch.device) -> Slot:
        slot = Slot(self._num_slots, nbytes, device, self.num_builds)
        self._num_slots += 1
        return slot

    def note_host_draw(self, operation: str, parameter: str | None, device_type: str) -> None:
        self.host_draws.append(HostDraw(self.num_builds, operation, parameter, device_type))

    def append(self, node: Node) -> None:
        index = len(self.nodes)
        self.nodes.append(node)
        for slot in node.writes:
            slot.writers.append(index)

    def constant(self, tensor: Tensor) -> Constant:
        constant = Constant(tensor)
        if constant.is_reference:
            self.constants.append(constant)
        return constant

    def plan(self, wanted: Iterable[Slot]) -> list[int]:
        """The nodes that must run to have the ``wanted`` slots as they stand at the end, in an order to run them.

        Not program order: a node runs just before the first that needs it, what it reads before what it changes.
        So a layer that is scaled by the one before it needs two layers in memory, not all layers since the first.
        """
        targets = list(dict.fromkeys(wanted))
        needed = self._needed(targets)
        before = self._must_precede(sorted(needed))
        order: list[int] = []
        done: set[int] = set()
        stack = [slot.writers[-1] for slot in reversed(targets) if slot.writers]
        while stack:
            index = stack[-1]
            waiting = [other for other in before[index] if other not in done]
            if waiting and index not in done:
                stack.append(waiting[0])
                continue
            stack.pop()
            if index not in done:
                done.add(index)
                order.append(index)
        return order

    def _needed(self, wanted: Sequence[Slot]) -> set[int]:
        needed: set[int] = set()
        pending = [(slot, len(self.nodes)) for slot in wanted]
        while pending:
            slot, before = pending.pop()
            position = bisect_left(slot.writers, before)
            if position == 0:
                continue  # nothing wrote it yet
            index = slot.writers[position - 1]
            if index in needed:
                continue
            needed.add(index)
            node = self.nodes[index]
            pending.extend((other, index) for other in node.reads)
            pending.extend((other, index) for other in node.writes if other is not node.overwrites)
        return needed

    def _must_precede(self, plan: Sequence[int]) -> dict[int, list[int]]:
        """For each node of an ascending plan: the nodes that must run before it, reads of other slots first."""
        last_writer: dict[Slot, int] = {}
        readers: dict[Slot, list[int]] = {}  # since the last write
        before: dict[int, list[int]] = {}
        for index in plan:
            node = self.nodes[index]
            writes = set(node.writes)
            others = [last_writer[slot] for slot in node.reads if slot not in writes and slot in last_writer]
            own = [last_writer[slot] for slot in node.writes if slot in last_writer]
            hazards = [reader for slot in node.writes for reader in readers.get(slot, ())]
            before[index] = list(dict.fromkeys([*others, *hazards, *own]))
            for slot in node.reads:
                readers.setdefault(slot, []).append(index)
            for slot in node.writes:
                last_writer[slot], readers[slot] = index, []
        return before

    def last_uses(self, plan: Sequence[int]) -> dict[Slot, int]:
        """For each slot a plan touches, the node of the plan that does so last."""
        last: dict[Slot, int] = {}
        for index in plan:
            node = self.nodes[index]
            for slot in (*node.reads, *node.writes):
                last[slot] = index
        return last


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor among an operation's arguments, lists and tuples opened."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``change`` applied to everything that is no list, tuple or dict."""
    if isinstance(value, list):
        return [map_leaves(change, item) for item in value]
    if isinstance(value, tuple):
        return tuple(map_leaves(change, item) for item in value)
    if isinstance(value, dict):
        return {key: map_leaves(change, item) for key, item in value.items()}
    return change(value)
