"""The tensors of one flat parameter and their life.

| tensor | shape | dtype | owner, memory | alive |
|---|---|---|---|---|
| ``sharded`` | [shard_numel] | the parameters' own | this handle, SHARD memory of the wire | as long as the model |
| ``full`` | [padded_numel] | compute dtype | pool, FULL | unshard to reshard |
| gradient source | [padded_numel] | reduce dtype | pool, GRAD_FULL (F = 1: the gradient) | to end of reduce-scatter |
| reduced shard | [shard_numel] | reduce dtype | pool, GRAD_SHARD, or the gradient | reduce-scatter to accumulate |
| ``gradient`` | [shard_numel] | the parameters' own | ``ShardGradient``, GRAD_SHARD | first reduction to zero_grad |
| ``unwritten`` | per parameter | compute dtype | this handle | in-place write in forward to end of backward |
| ``unsynced`` | [padded_numel] | reduce dtype | pool, GRAD_FULL | first to last micro-batch without communication |

``sharded`` and ``full`` are two tensors with two names; neither is ever pointed at the other's memory, except that
F = 1 without conversion reads ``sharded`` itself (``Wire.full_view``). The parameters of the modules are
``ShardedTensor`` views of ``sharded`` and keep their identity for life.

Streams: ``full`` is filled on the gather stream and read on the compute stream, which waits for the gather's event;
reshard hands the buffer back with an event of the compute stream. Gradient sources are written on the compute
stream and read on the reduce stream.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.comm.memory import Buffer, BufferPool
from fsdp_core.comm.streams import HAPPENED, Event, Streams
from fsdp_core.comm.wire import BufferRole, DoneWork, Label, Wire, Work
from fsdp_core.errors import StateError
from fsdp_core.handle.flat_parameter import FlatParameter
from fsdp_core.handle.gradient_source import GradientSources
from fsdp_core.handle.shard_gradient import ShardGradient
from fsdp_core.handle.sharded_tensor import (
    ShardedTensor,
    ShardSpec,
    WriteCount,
    flat_in_memory_order,
)
from fsdp_core.layout.flat_layout import FlatLayout, Segment

_NO_WORK = DoneWork()


class HandleState(enum.Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"


@dataclass(frozen=True, eq=False)
class Place:
    """Where a module keeps a parameter: ``module._parameters[name]``."""

    module: nn.Module
    name: str
    fqn: str


@dataclass(frozen=True)
class HandleDtypes:
    """param: master copy; compute: gathered; reduce: gradient reduction and unsynchronised sums."""

    param: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True, eq=False)
class Resources:
    """What the handles of one root share."""

    pool: BufferPool
    streams: Streams

    def __deepcopy__(self, memo: dict[int, Any]) -> Resources:
        copied = memo[id(self)] = Resources(BufferPool(self.streams, self.pool.is_pooled), self.streams)
        return copied


class FlatParamHandle:
    """One flat parameter of a unit. A unit has one per (dtype, trainable at wrap time, compute dtype)."""

    unit: Any  # the unit it belongs to, set by that unit; the handle only passes it on

    def __init__(
        self,
        *,
        unit_name: str,
        layout: FlatLayout,
        places: Sequence[tuple[Place, ...]],
        dtypes: HandleDtypes,
        wire: Wire,
        replicate_wire: Wire,
        resources: Resources,
        shard_device: torch.device,
    ) -> None:
        self.unit_name = unit_name
        self.layout = layout
        self.places = tuple(places)  # per segment: everywhere the parameter is reachable (tied weights: several)
        self.dtypes = dtypes
        self.wire, self.replicate_wire = wire, replicate_wire
        self.resources = resources
        self.is_offloaded = shard_device != wire.device
        self.state = HandleState.SHARDED
        self.sharded = self._allocate_sharded(shard_device)
        self.writes = WriteCount()
        self.params: tuple[ShardedTensor, ...] = ()
        self.flat_parameter: FlatParameter | None = None
        self.unsynced: Buffer | None = None
        self._prepare()

    def _prepare(self) -> None:
        """What follows from the rest, for a new handle and for a copy."""
        self.views_key = _views_key(self.layout)
        self.gradient = ShardGradient(self)
        self.full_buffer: Buffer | None = None
        self._work: Work = _NO_WORK
        self._gathered: Event = HAPPENED
        self._unwritten: dict[int, Tensor] = {}
        self.sources = GradientSources(self)
        view = None if self.is_offloaded else self.wire.full_view(self.sharded, self.dtypes.compute)
        self.fixed_full: Buffer | None = None if view is None else Buffer(view)

    def _allocate_sharded(self, device: torch.device) -> Tensor:
        if not self.is_offloaded:
            sharded = self.wire.empty(self.layout.shard_numel, self.dtypes.param, BufferRole.SHARD)
        else:
            sharded = torch.empty(
                self.layout.shard_numel, dtype=self.dtypes.param, device=device, pin_memory=torch.cuda.is_available()
            )
        return sharded.zero_()  # padding must never hold garbage that a norm or a checkpoint could see

    # -- parameters ---------------------------------------------------------------------------------------------------

    def make_parameters(self, requires_grad: Sequence[bool]) -> tuple[ShardedTensor, ...]:
        """The sharded parameters, one per segment."""
        made = []
        for segment, needs_grad in zip(self.layout.segments, requires_grad, strict=True):
            span = self.layout.local_span(segment, self.wire.group_rank)
            spec = ShardSpec(segment.fqn, torch.Size(segment.shape), segment.stride, span, self.wire)
            local = self.sharded[span.shard_start : span.shard_end]
            parameter = ShardedTensor(local, spec, requires_grad=needs_grad, count=self.writes)
            parameter._is_param = True
            parameter.owner = self
            made.append(parameter)
        self.params = tuple(made)
        return self.params

    def index_of(self, parameter: Tensor) -> int:
        return next(index for index, one in enumerate(self.params) if one is parameter)

    def note_outside(self, parameter: ShardedTensor) -> None:
        """Autograd has put a gradient into ``parameter``, past the unit's node."""
        self.unit.context.note_outside(self, parameter)

    def write_original(self, index: int, value: Tensor) -> None:
        """Take this rank's part of a whole original parameter (any device, any float dtype)."""
        segment = self.layout.segments[index]
        span = self.layout.local_span(segment, self.wire.group_rank)
        if span.numel == 0:
            return
        with torch.no_grad():
            spec = ShardSpec(segment.fqn, torch.Size(segment.shape), segment.stride, span, self.wire)
            flat = flat_in_memory_order(value.detach(), spec)
            self.sharded[span.shard_start : span.shard_end].copy_(flat[span.start : span.end])
        self.writes.writes += 1

    def rename(self, name_of: Callable[[Place], str]) -> None:
        """Names count from another root now; places, segments and specs all carry them."""
        self.places = tuple(tuple(replace(place, fqn=name_of(place)) for place in places) for places in self.places)
        names = [places[0].fqn for places in self.places]
        segments = tuple(replace(s, fqn=name) for s, name in zip(self.layout.segments, names, strict=True))
        self.layout = replace(self.layout, segments=segments)
        for parameter, name in zip(self.params, names, strict=True):
            parameter.spec = replace(parameter.spec, fqn=name)

    def write_epoch(self) -> int:
        """Grows with every write to the parameters that can be seen (fused ones on a flat parameter cannot)."""
        return self.sharded._version + self.writes.writes

    # -- unshard, wait, reshard --------------------------------------------------------------------------------------

    def _move(self, state: HandleState, allowed: tuple[HandleState, ...]) -> None:
        if self.state not in allowed:
            raise StateError(
                f"A unit cannot become {state.value} now.",
                unit=self.unit_name,
                expected=" or ".join(one.value for one in allowed),
                got=self.state.value,
            )
        self.state = state

    @property
    def full_nbytes(self) -> int:
        return self.layout.padded_numel * self.dtypes.compute.itemsize

    def issue_unshard(self, label: Label) -> None:
        """Take memory and start the gather on the gather stream."""
        self._move(HandleState.GATHERING, (HandleState.SHARDED,))
        streams = self.resources.streams
        if self.fixed_full is not None:
            self.full_buffer = self.fixed_full
            self._work = self.wire.all_gather(self.fixed_full.memory, self.sharded, label)
            return
        with streams.on_gather():
            buffer = self.resources.pool.acquire(
                self.wire, self.layout.padded_numel, self.dtypes.compute, BufferRole.FULL
            )
            self.full_buffer = buffer
            source = self.sharded
            if self.is_offloaded:  # host to device into this rank's own place, then gather in place
                start, end = self.layout.shard_span(self.wire.group_rank)
                source = buffer.tensor[start:end].copy_(self.sharded, non_blocking=True)
            self._work = self.wire.all_gather(buffer.tensor, source, label)
            self._gathered = streams.record()

    def wait_unshard(self) -> None:
        """Order the caller's stream behind the gather."""
        self._move(HandleState.FULL, (HandleState.GATHERING,))
        work, self._work = self._work, _NO_WORK
        work.wait()
        self.resources.streams.wait(self._gathered)
        if not self.resources.streams.is_inline and self.fixed_full is None and self.full_buffer is not None:
            self.resources.streams.keep_for_current(self.full_buffer.memory)
        if self._unwritten:
            with torch.no_grad():
                self._show_unwritten()

    def reshard(self) -> None:
        """Give ``full`` back; the caller's stream holds its last use."""
        if self.state is HandleState.GATHERING:
            self.wait_unshard()
        self._move(HandleState.SHARDED, (HandleState.FULL,))
        buffer, self.full_buffer = self.full_buffer, None
        if buffer is not None and buffer is not self.fixed_full:
            self.resources.pool.release(self.wire, buffer, BufferRole.FULL)

    def full_views(self) -> list[Tensor]:
        """One view of ``full`` per segment, in original shape and stride. Made once per buffer."""
        buffer = self.full_buffer
        if buffer is None:
            raise StateError("The parameters of a unit are not gathered.", unit=self.unit_name, got=self.state.value)
        return buffer.cached(("full", self.views_key), self.make_views)

    def make_views(self, memory: Tensor) -> list[Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            base = memory.storage_offset()
            return [memory.as_strided(s.shape, s.stride, base + s.start) for s in self.layout.segments]

    def write_back(self, index: int, full: Tensor) -> None:
        """A module wrote into a gathered parameter in place. Peers may be reading the shard: keep the new values,
        show them in every gather until ``settle`` may put them there."""
        self._unwritten[index] = full.detach().clone(memory_format=torch.preserve_format)
        self.writes.writes += 1

    def _show_unwritten(self) -> None:
        views = self.full_views()
        for index, value in self._unwritten.items():
            views[index].copy_(value)

    def settle(self) -> None:
        """No peer reads the shard now: put in what modules wrote into gathered parameters."""
        unwritten, self._unwritten = self._unwritten, {}
        for index, value in unwritten.items():
            self.write_original(index, value)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def segment_range(self, index: int) -> tuple[int, int]:
        segment: Segment = self.layout.segments[index]
        return segment.start, segment.end

    def refuse_partly_frozen(self) -> None:
        """Raises ``StateError`` if a flat parameter would have an optimizer step on frozen parameters."""
        flags = [parameter.requires_grad for parameter in self.params]
        if all(flags) or not any(flags):
            return
        frozen = [parameter.spec.fqn for parameter, trains in zip(self.params, flags, strict=True) if not trains]
        raise StateError(
            "Some parameters were frozen that share a flat parameter with others that train: its optimizer would decay "
            "and move them.",
            unit=self.unit_name,
            parameter=", ".join(frozen[:3]),
            remedy="freeze before sharding, freeze whole units, or step on model.parameters() instead",
        )

    @property
    def has_unsent_sum(self) -> bool:
        """Are there sums of micro-batches that were neither sent nor cleared?"""
        markers = self.gradient.markers
        return self.unsynced is not None and any(not markers.is_cleared(index) for index in markers.indices)

    # -- copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParamHandle:
        if id(self) in memo:
            return memo[id(self)]
        copied = object.__new__(FlatParamHandle)
        memo[id(self)] = copied
        copied.unit_name, copied.layout, copied.dtypes = self.unit_name, self.layout, self.dtypes
        copied.wire, copied.replicate_wire = self.wire, self.replicate_wire
        copied.is_offloaded = self.is_offloaded
        copied.state, copied.unsynced, copied.flat_parameter = HandleState.SHARDED, None, None
        copied.writes = WriteCount()
        copied.sharded = self._allocate_sharded(self.sharded.device)
        copied.sharded.copy_(self.sharded)
        copied.make_parameters([parameter.requires_grad for parameter in self.params])
        for old, new in zip(self.params, copied.params, strict=True):
            memo[id(old)] = new
        copied.resources = deepcopy(self.resources, memo)
        copied.places = deepcopy(self.places, memo)
        copied._prepare()
        copied.gradient.copy_from(self.gradient)
        if self.unsynced is not None:
            copied.unsynced = copied.sources.acquire()
            copied.unsynced.tensor.copy_(self.unsynced.tensor)
            markers = self.gradient.markers
            kept = [index for index in markers.indices if not markers.is_cleared(index)]
            for index in set(range(len(self.params))).difference(kept):
                start, end = self.segment_range(index)
                copied.unsynced.tensor[start:end].zero_()
            copied.gradient.markers.set(kept)
        return copied


_keys: dict[tuple[Any, ...], int] = {}


def _views_key(layout: FlatLayout) -> int:
    """The same small number for layouts that cut a buffer alike: units of equal blocks share a buffer's views."""
    facts = tuple((segment.shape, segment.stride, segment.start) for segment in layout.segments)
    return _keys.setdefault(facts, len(_keys))
