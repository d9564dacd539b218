"""From unsharded gradients to averaged, reduced shards (paper sections 3.2 and 4.4).

Order of one reduction: source filled on the compute stream; on the reduce stream reduce-scatter in the sharding
group, all-reduce of the shard in the replication group, and then either become the gradient or be added to it. The
wire that sums last divides (fp16: the source is divided before, since its sums could overflow). Where the result will
simply be the gradient, the wires write into the gradient's own memory; with F = 1 that memory is the source, too.
At most ``MAX_PENDING`` sources are alive at any time.

A pooled source goes back when the reduction after the next needs room: the compute stream waits for who had it before,
and must not meet the reduce-scatter that has just begun. One from the allocator goes back as soon as its reduce-scatter
is issued, where streams lag behind the host: the allocator keeps it until the reduce stream is past it.

Gradients become visible in ``param.grad`` only at the end of backward where they are the first of their step, so
that a failed backward leaves none behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_core.comm.memory import Buffer
from fsdp_core.comm.streams import Streams
from fsdp_core.comm.wire import BufferRole, DoneWork, Label, Work
from fsdp_core.handle.flat_param_handle import FlatParamHandle
from fsdp_core.handle.sum_markers import SumMarkers

MAX_PENDING = 2
_DONE = DoneWork()
_NOTHING = torch.empty(0)


@dataclass(frozen=True)
class Divisors:
    """What a gradient is divided by, and where: as a source, by the reduce-scatter, by the all-reduce."""

    source: float = 1.0
    scatter: float = 1.0
    replicate: float = 1.0


def divisors_of(handle: FlatParamHandle, factor: float) -> Divisors:
    if handle.dtypes.reduce == torch.float16:
        return Divisors(source=factor)
    if handle.wire.group_size > 1 and handle.replicate_wire.group_size == 1:
        return Divisors(scatter=factor)
    return Divisors(replicate=factor)


class Reduction:
    """One flat gradient on its way through the wires."""

    def __init__(
        self, handle: FlatParamHandle, source: Buffer, active: Sequence[int], label: Label, divide_factor: float
    ) -> None:
        self.handle, self.active, self.label = handle, tuple(active), label
        self.divisors = divisors_of(handle, divide_factor)
        self.source: Buffer | None = source
        self.shard_buffer: Buffer | None = None
        self.shard: Tensor = source.tensor
        self.work: Work = _DONE
        self.is_staged = False

    def start(self) -> None:
        """Issue the reduce-scatter; with F = 1 there is none, and the source is the shard."""
        handle, source = self.handle, self.source
        assert source is not None
        if self.divisors.source != 1:
            source.tensor.div_(self.divisors.source)
        if handle.wire.group_size == 1:
            return
        target = handle.gradient.claim_target(handle.dtypes.reduce)
        if target is None:
            target = self.shard_buffer = handle.resources.pool.acquire(
                handle.replicate_wire, handle.layout.shard_numel, handle.dtypes.reduce, BufferRole.GRAD_SHARD
            )
        self.shard = target.tensor
        self.work = handle.wire.reduce_scatter(self.shard, source.tensor, self.label, self.divisors.scatter)

    def replicate(self) -> None:
        """Wait for the reduce-scatter, give the source back, issue the all-reduce of the shard."""
        self.work.wait()
        if self.handle.wire.group_size > 1:
            self._release_source()
        label = Label(self.label.unit_id, "replicate", self.label.unit)
        self.work = self.handle.replicate_wire.all_reduce(self.shard, label, "sum", self.divisors.replicate)

    def complete(self) -> bool:
        """Wait, and add; true if the result waits in place for ``commit`` instead."""
        self.work.wait()
        self.work = _DONE
        if self.handle.is_offloaded and not self.handle.gradient.is_empty:
            self.shard = self.shard.to(self.handle.sharded.device)  # the sum is made on the host, which waits for it
        self.is_staged = self.handle.gradient.stage(self.shard)
        if not self.is_staged and not self.waits_for_hooks():
            self.handle.gradient.accumulate(self.shard, self.active)
            self._release_all()
            return False
        if self.is_staged:
            self._release_all()
        return True

    def commit(self) -> None:
        """Call the user's tensor hooks, make the gradient visible, call the post-accumulate hooks."""
        gradient, has_hooks = self.handle.gradient, self.waits_for_hooks()
        if has_hooks:
            gradient.run_tensor_hooks(None if self.is_staged else self.shard, self.active)
        if self.is_staged:
            gradient.commit(self.active)
        else:
            gradient.accumulate(self.shard, self.active)
            self._release_all()
        if has_hooks:
            gradient.run_post_accumulate_hooks(self.active)

    def drop(self) -> None:
        """A failed backward: wait so that the wire is in order, and forget."""
        self.work.wait()
        self.work = _DONE
        self.handle.gradient.drop_target()
        self._release_all()

    def waits_for_hooks(self) -> bool:
        return any(self.handle.params[index].has_user_hooks for index in self.active)

    def _release_source(self) -> None:
        if self.source is not None:
            self.handle.sources.release(self.source)
            self.source = None

    def _release_all(self) -> None:
        self.shard = _NOTHING  # a reduction waits for the end of backward: its memory must not wait with it
        self._release_source()
        if self.shard_buffer is not None:
            self.handle.resources.pool.release(self.handle.replicate_wire, self.shard_buffer, BufferRole.GRAD_SHARD)
            self.shard_buffer = None


def _once_per_gradient(waiting: list[Reduction]) -> list[Reduction]:
    """Several reductions of one backward have added up in place: the sum is shown, and meets the user's hooks, once."""
    first: dict[int, Reduction] = {}
    kept = []
    for reduction in waiting:
        known = first.get(id(reduction.handle)) if reduction.is_staged else None
        if known is not None:
            known.active = tuple(sorted({*known.active, *reduction.active}))
            continue
        kept.append(reduction)
        if reduction.is_staged:
            first[id(reduction.handle)] = reduction
    return kept


def show(finished: Sequence[Reduction]) -> None:
    """Make the gradients of a backward visible. If a hook of the user raises, those that were not are forgotten."""
    with torch.no_grad():
        for index, reduction in enumerate(finished):
            try:
                reduction.commit()
            except BaseException:
                for left in finished[index:]:
                    left.drop()
                raise


class Reducer:
    """The reductions of one root that are on their way, oldest first."""

    def __init__(self, streams: Streams, pooled: bool = True) -> None:
        self._streams = streams
        self._lets_go_at_once = not pooled and not streams.is_inline
        self._scattering: deque[Reduction] = deque()
        self._replicating: deque[Reduction] = deque()
        self._waiting: list[Reduction] = []  # complete; visible at the end of backward
        self._added: list[SumMarkers] = []  # the running backward has added to what earlier ones left there

    def note_addition(self, handle: FlatParamHandle, active: Sequence[int]) -> None:
        """Should this backward fail, that cannot be undone."""
        handle.gradient.markers.note_addition(active)
        self._added.append(handle.gradient.markers)

    def make_room(self) -> None:
        """Finish old reductions until a new source may be taken."""
        while len(self._scattering) + self._num_replicating() >= MAX_PENDING:
            self._advance()

    def _num_replicating(self) -> int:
        """Those that count: all, if none holds a source any more, for their shards are memory, too."""
        if self._lets_go_at_once:
            return len(self._replicating)
        return sum(1 for reduction in self._replicating if reduction.source is not None)

    def _advance(self) -> None:
        with self._streams.on_reduce():
            if self._scattering and (len(self._replicating) < MAX_PENDING):
                reduction = self._scattering.popleft()
                reduction.replicate()
                self._replicating.append(reduction)
                return
            reduction = self._replicating.popleft()
            if reduction.complete():
                self._waiting.append(reduction)
            else:
                self.note_addition(reduction.handle, reduction.active)

    def start(self, reduction: Reduction) -> None:
        """Issue; the source has been filled on the caller's stream."""
        filled = self._streams.record()
        goes_on = reduction.handle.wire.group_size == 1 or self._lets_go_at_once
        with self._streams.on_reduce():
            self._streams.wait(filled)
            reduction.start()
            if goes_on:  # F = 1: there is no reduce-scatter to wait for
                reduction.replicate()
        (self._replicating if goes_on else self._scattering).append(reduction)

    def finish(self) -> list[Reduction]:
        """Wait for everything; the caller's stream is ordered behind it. Returns what is to be committed."""
        while self._scattering or self._replicating:
            self._advance()
        with self._streams.on_reduce():
            done = self._streams.record()
        self._streams.wait(done)
        if any(reduction.handle.is_offloaded for reduction in self._waiting):
            done.synchronize()  # the optimizer reads these on the host
        waiting, self._waiting = self._waiting, []
        for markers in self._added:
            markers.forget_addition()
        self._added.clear()
        return _once_per_gradient(waiting)

    def drop(self) -> None:
        """Forget everything that is on its way (a failed backward)."""
        pending = [*self._scattering, *self._replicating, *self._waiting]
        self._scattering.clear()
        self._replicating.clear()
        self._waiting = []
        for reduction in pending:
            reduction.drop()
        for markers in self._added:
            markers.tear()
        self._added.clear()
