"""What all units of one root share: order, limits, memory, the reductions on their way, and the end of a backward.

State that belongs to one pass (an outermost forward and what follows until the next) is in ``Pass``; state of a
backward in ``BackwardTasks``. Both are dropped and made anew, so that a step that failed leaves no trace.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp_core.comm.wire import Wire
from fsdp_core.handle.flat_param_handle import FlatParamHandle, HandleState, Resources
from fsdp_core.handle.sharded_tensor import ShardedTensor
from fsdp_core.numerics.reduction import Reducer
from fsdp_core.runtime.gradient_flow import flush_unsynced, show_gradients, take_gradients
from fsdp_core.runtime.limit_agreement import LimitAgreement, cuda_sample
from fsdp_core.runtime.passes import BackwardTasks, EndOfBackward, Pass
from fsdp_core.runtime.rate_limiter import RateLimiter
from fsdp_core.runtime.saved_weights import SavedTensorHooks
from fsdp_core.runtime.sites import check_owned
from fsdp_core.runtime.step_guard import are_shards_read, shards_are_free, shards_are_read, sums_are_kept, sums_are_sent
from fsdp_core.trace.events import EventLog, FlightRecorder
from fsdp_core.trace.labels import labelled

if TYPE_CHECKING:
    from fsdp_core.runtime.unit import Unit

_current_graph_task_id = torch._C._current_graph_task_id
_log = logging.getLogger("fsdp_core")
_numbers = itertools.count()  # contexts are made in the same order on all ranks


class Context:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        resources: Resources,
        limiter: RateLimiter,
        backward_prefetch: bool,
        forward_prefetch: bool,
    ) -> None:
        self.number = next(_numbers)
        self.resources = resources
        self.limiter = limiter
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.units: list[Unit] = []
        self.lifted: list[tuple[str, int, list[str]]] = []  # shared parameters: name, bytes, places
        self.root: Unit
        self.ignored: set[nn.Module] = set()
        self._is_checked = False  # do units own all that trains? Asked once, when the first pass begins
        self.reducer = Reducer(resources.streams, resources.pool.is_pooled)
        self.saved_tensor_hooks = SavedTensorHooks()
        self.log: EventLog | None = None
        self.flight: FlightRecorder | None = None
        self.sync_gradients = True
        self.shows_full = False  # modules have plain whole parameters for a while: units stand aside
        self.divide_factor: float | None = None  # None: the number of ranks
        self.limit_agreement: LimitAgreement | None = None
        self.current = Pass([], has_grad=False)
        self.tasks = BackwardTasks()
        self._closing: Unit | None = None  # all its saved weights are back; freed at the next event of backward
        self._in_backward: set[int] = set()  # units entered in this backward

    def adopt(self, units: Sequence[Unit], root: Unit) -> None:
        """Take units (of this root, or of roots below it) in; ids are positions, the same on all ranks."""
        self.units, self.root = list(units), root
        self._start_agreement()
        for unit_id, unit in enumerate(self.units):
            unit.context, unit.is_root = self, unit is root
            unit.set_id(unit_id, unit.name)

    def _start_agreement(self) -> None:
        self.limit_agreement = None
        if self.limiter.limit.kind == "adaptive":
            wire = self.root.groups.world
            sample = functools.partial(cuda_sample, wire.device) if wire.device.type == "cuda" else None
            self.limit_agreement = LimitAgreement(self.limiter, wire, sample)

    def record(
        self, kind: str, unit: Unit | None = None, phase: str = "", stream: str = "compute", nbytes: int = 0
    ) -> None:
        """What has been done: a row of the log, where one is kept."""
        if self.log is not None:
            self.log.record(kind, unit.name if unit is not None else "", phase, stream, nbytes)

    def tell(self, kind: str, unit: Unit | None = None, phase: str = "") -> None:
        """What this rank turns to now, and may not come back from: for the flight record."""
        if self.flight is not None:
            self.flight.event(kind, unit.name if unit is not None else "", phase)

    def gather_wires(self) -> list[Wire]:
        """The wires of sharding groups, each once."""
        return list({id(unit.groups.shard): unit.groups.shard for unit in self.units}.values())

    # -- forward -----------------------------------------------------------------------------------------------------

    def enter_forward(self, unit: Unit) -> None:
        """A unit's forward begins (not a recomputation)."""
        if self.current.num_open == 0 or (unit.is_root and not unit.calls):
            self.begin_pass()
        current = self.current
        current.num_open += 1
        self._free_finished(unit)
        self.unshard_now(unit, "forward")
        if self.forward_prefetch:
            following = current.prediction.after(unit.unit_id)
            if following is not None:
                self.prefetch(self.units[following])
        current.order.record(unit.unit_id)
        self.tell("forward", unit)
        self.record("forward", unit, "" if unit.handles else "empty")

    def leave_forward(self, unit: Unit, has_failed: bool) -> None:
        """A unit's forward has returned or raised."""
        current = self.current
        if not has_failed:  # an error is told with where it came up
            self.tell("forward_end", unit)
        self.record("forward_end", unit, "failed" if has_failed else "")
        current.num_open -= 1
        if has_failed or not current.has_grad:
            self.free(unit)
        elif not unit.calls and not unit.is_root:
            if unit.frees_after_forward:
                current.free_later.append(unit)
            else:
                self.keep(unit)
        if current.num_open == 0:
            self._end_outermost_forward(has_failed)

    def begin_pass(self) -> None:
        """Everything is sharded again, whatever happened before; gathers come after the optimizer's writes."""
        if self.tasks.callbacks or self.current.num_open:
            self.forget_failed_pass()
        if not self._is_checked:
            check_owned(self.root.modules[0], self.ignored)
            self._is_checked = True
        for unit in self.units:
            if not unit.is_sharded:
                self.free(unit)
        self.limiter.reset()
        previous = self.current.order.recorded
        self.current = Pass(previous, torch.is_grad_enabled())
        self._in_backward.clear()
        self._closing = None
        streams = self.resources.streams
        written = streams.record()
        with streams.on_gather():
            streams.wait(written)
        if are_shards_read(self):  # no backward ended the last pass: what ranks wrote since has to be awaited
            self.tell("settle")
            for wire in self.gather_wires():
                wire.quiesce()
        shards_are_read(self)
        self.tell("pass")
        self.record("pass")

    def forget_failed_pass(self) -> None:
        """A forward or backward raised: take everything back to where a pass begins."""
        self.record("drop")
        self._drop_reductions()
        self.tasks = BackwardTasks()
        for unit in self.units:
            unit.forget_calls()
        self.current.num_open = 0
        self.saved_tensor_hooks.abandon()
        self.saved_tensor_hooks = SavedTensorHooks()

    def _drop_reductions(self) -> None:
        self.reducer.drop()
        for _, handle in self.each_handle():
            handle.sources.drop_collection()
            handle.gradient.outside.clear()

    def _end_outermost_forward(self, has_failed: bool) -> None:
        """Keep the last unit for backward, free the others; without a backward to come, free all."""
        current = self.current
        if has_failed or not current.has_grad:
            for unit in self.units:
                if not unit.is_sharded:
                    self.free(unit)
            if not has_failed:  # after a failure ranks may be in different places
                self._quiesce()
        elif current.free_later:
            for unit in current.free_later[:-1]:
                self._free_unless_open(unit)
            self.keep(current.free_later[-1])
            for unit in self.units:
                if unit.is_prefetched:
                    self.free(unit)
        current.free_later.clear()

    def _free_finished(self, beginning: Unit) -> None:
        finished, self.current.free_later = self.current.free_later, []
        for unit in finished:
            if unit is not beginning:
                self._free_unless_open(unit)

    def _free_unless_open(self, unit: Unit) -> None:
        if not unit.calls and not unit.is_sharded:
            self.free(unit)

    # -- gathering and freeing ---------------------------------------------------------------------------------------

    def unshard_now(self, unit: Unit, phase: str) -> None:
        """Make the unit's full parameters usable on the caller's stream."""
        if phase == "backward":
            self._enter_backward(unit)
        is_issued = any(handle.state is HandleState.SHARDED for handle in unit.handles)
        if is_issued:
            is_within = unit.is_root or self.limiter.enter(unit) or self._drop_prefetches(unit)
            # beyond the limit only if all that is in flight are open forwards around this one
            traced = phase if is_within else "nested"
            self.tell("gather", unit, traced)
            self.record("gather", unit, traced, "gather", unit.full_nbytes)
            with labelled("gather", unit.name):
                unit.issue_unshard(phase)
        if any(handle.state is HandleState.GATHERING for handle in unit.handles):
            if not is_issued:
                self.tell("await", unit, phase)
            with labelled("wait", unit.name):
                unit.wait_unshard()
            self.record("wait", unit)
            if unit.was_written_while_gathering:
                self.record("write", unit)
        if phase == "backward" and unit.unit_id not in self._in_backward:
            self._prefetch_before(unit)
            self._in_backward.add(unit.unit_id)
            self.tell("backward", unit)

    def _enter_backward(self, unit: Unit) -> None:
        if self._closing is not None and self._closing is not unit:
            self._close()
        if unit.unit_id not in self._in_backward:
            self.record("backward", unit)

    def _prefetch_before(self, unit: Unit) -> None:
        """Backward prefetch: gather what backward needs after ``unit``."""
        previous = self.current.order.before(unit.unit_id) if self.backward_prefetch else None
        if previous is not None and self.units[previous].needs_weights_in_backward:
            self.prefetch(self.units[previous])

    def prefetch(self, unit: Unit) -> None:
        """Start a gather that will be needed soon, if the limit leaves room for it.

        Waits for computations to finish, but never for the newest one: the device must not run dry.
        """
        if not unit.is_sharded or unit.calls or unit.unit_id in self._in_backward or unit.is_root:
            return
        if not self.limiter.make_room(num_spared=1):
            return
        self.limiter.enter(unit)
        self.tell("gather", unit, "prefetch")
        self.record("gather", unit, "prefetch", "gather", unit.full_nbytes)
        with labelled("gather", unit.name):
            unit.issue_unshard("backward" if _current_graph_task_id() != -1 else "forward")
        unit.is_prefetched = True

    def _drop_prefetches(self, needed: Unit) -> bool:
        """The order has changed: units gathered too early make way for the one that is needed now."""
        early = [unit for unit in self.units if unit.is_prefetched and unit is not needed]
        for unit in early:
            self.free(unit)
        return bool(early)

    def free(self, unit: Unit) -> None:
        """Give the unit's gathered buffers back, behind the computation that reads them."""
        was_full = not unit.is_sharded
        unit.free_full()
        self.limiter.leave(unit, self.resources.streams.record())
        if was_full:
            self.record("free", unit, nbytes=unit.full_nbytes)

    def keep(self, unit: Unit) -> None:
        """The unit stays gathered until its backward; it no longer counts as in flight."""
        self.limiter.leave(unit, self.resources.streams.record())
        self.record("keep", unit)

    def close_later(self, unit: Unit) -> None:
        """All saved weights of the unit are back; the operation that asked for the last one has still to run."""
        self._closing = unit

    def _close(self) -> None:
        unit, self._closing = self._closing, None
        if unit is not None and not unit.trainable_positions and not unit.is_root:
            self._free_unless_open(unit)

    # -- backward ----------------------------------------------------------------------------------------------------

    def note_backward(self) -> None:
        """Called at every event of a backward: the first one asks autograd to call us at its end."""
        task = _current_graph_task_id()
        if task in self.tasks.callbacks:
            return
        if self.tasks.forget_failed():
            self._drop_reductions()
        if not self.tasks.callbacks:
            self._in_backward.clear()
        callback = EndOfBackward(self, task)
        self.tasks.callbacks[task] = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def note_outside(self, handle: FlatParamHandle, parameter: ShardedTensor) -> None:
        """Autograd itself has put a gradient into a parameter: an event of backward, maybe its only kind."""
        grad = handle.gradient.take_outside(parameter)
        self.note_backward()
        handle.gradient.markers.check_whole(handle.unit_name)
        handle.gradient.note_outside(parameter, grad)
        if grad is None:  # it is there to be seen already
            self.reducer.note_addition(handle, [handle.index_of(parameter)])

    def reduce_unit(self, unit: Unit, node: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The backward of a unit's node. Returns gradients only where autograd itself was asked for them."""
        self.note_backward()
        self._enter_backward(unit)
        self._in_backward.add(unit.unit_id)
        self.record("gradients", unit)
        if not unit.calls:
            self.free(unit)
        # The second chance: when the unit was entered, the device was a unit behind and there may have been no room.
        # Now the unit's whole backward is queued; it is the last moment to be ahead of its reduction.
        self._prefetch_before(unit)
        return take_gradients(self, unit, node, grads)

    def end_backward(self, task: int) -> None:
        """Autograd is about to return: wait for reductions, show gradients, shard everything, check the ranks."""
        self.tasks.callbacks.pop(task, None)
        self.tasks.forget_failed()
        if self.tasks.callbacks:
            return  # a backward inside a backward (reentrant checkpointing): the outer one finishes
        if self.sync_gradients:
            flush_unsynced(self)
            sums_are_sent(self)
        self.tell("finish")
        with labelled("finish reductions of", self.root.name):
            finished = self.reducer.finish()
        self._closing = None
        for unit in self.units:
            if not unit.calls:
                unit.num_saved = 0
                if not unit.is_sharded:
                    self.free(unit)
        self._in_backward.clear()
        try:
            show_gradients(self, finished)
        finally:  # a hook of the user may have raised: the ranks stay together all the same
            self._quiesce()
        if self.limit_agreement is not None and self.sync_gradients:
            decision = self.limit_agreement.step()
            if decision is not None:
                self.record("limit", None, f"{decision.before} to {decision.after}")
                _log.info(
                    "rate limit %d -> %d from step %d: %s",
                    decision.before,
                    decision.after,
                    decision.step + 1,
                    decision.reason,
                )
        self.tell("backward_end")
        self.record("backward_end")

    def _quiesce(self) -> None:
        """From here until the next gather this rank's shards may be written."""
        self.tell("settle")
        for wire in self.gather_wires():
            wire.quiesce()
        for _, handle in self.each_handle():
            handle.settle()
        shards_are_free(self)

    # -- outside of passes -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Before anybody reads or writes parameters from outside; every rank calls."""
        self._quiesce()

    def each_handle(self) -> Iterable[tuple[Unit, FlatParamHandle]]:
        for unit in self.units:
            for handle in unit.handles:
                yield unit, handle

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        """An engine of its own over the copied units; groups and wires are shared, they cannot be copied."""
        if id(self) in memo:
            return memo[id(self)]
        copied = object.__new__(Context)
        memo[id(self)] = copied
        copied.number = next(_numbers)
        copied.resources = deepcopy(self.resources, memo)
        copied.limiter = RateLimiter(self.limiter.limit)
        copied.backward_prefetch, copied.forward_prefetch = self.backward_prefetch, self.forward_prefetch
        copied.lifted, copied.log, copied.flight = list(self.lifted), None, None
        copied.reducer = Reducer(copied.resources.streams, copied.resources.pool.is_pooled)
        copied.saved_tensor_hooks = SavedTensorHooks()
        copied.sync_gradients, copied.divide_factor = self.sync_gradients, self.divide_factor
        copied.shows_full, copied._is_checked = False, False
        copied.ignored = deepcopy(self.ignored, memo)
        copied.current, copied.tasks = Pass([], has_grad=False), BackwardTasks()
        copied._closing, copied._in_backward = None, set()
        copied.units = deepcopy(self.units, memo)
        copied.root = copied.units[self.units.index(self.root)]
        copied._start_agreement()
        if any(handle.unsynced is not None for _, handle in self.each_handle()):
            sums_are_kept(copied)
        return copied
