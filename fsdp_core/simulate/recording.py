"""One rank of W, played in one process on tensors without memory; whatever it asks of its device goes on a tape.

    with Recorder() as recorder:
        model = build()                                  # on the meta device
        fully_shard(model, process_group=recorder.ranks(rank=0, world_size=512), device="meta")
        train_one_step(model)
        recorder.begin_tape()
        train_one_step(model)
    recorder.tape

Nothing of the engine is written a second time: it runs as it is, with a wire, streams and events that write down
what they are asked. What depends on the device is taken to be the usual case of a busy one: an event has happened
only once the host has waited for it, or for a later one of its stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_core.comm.collectives import CollectivesWire
from fsdp_core.comm.groups import RankStandIn
from fsdp_core.comm.identity import CallRecord, Gather, read_before_steps
from fsdp_core.comm.local import LocalWire
from fsdp_core.comm.streams import Event, InlineStreams, Streams
from fsdp_core.comm.wire import BufferRole, DoneWork, Label, Wire, Work
from fsdp_core.runtime.find import contexts_in
from fsdp_core.simulate import tape as t
from fsdp_core.simulate.cost import cost_of
from fsdp_core.simulate.cuda_kernels import CudaKernels
from fsdp_core.trace.events import EventLog

_META = torch.device("meta")
_ELSEWHERE, _NO_BLOCK = "elsewhere", -1
_PRIMITIVES = {
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
}


class Recorder:
    """See the module's docstring. Blocks are found by their storages and freed when the last user lets go."""

    def __init__(self) -> None:
        self.tape = t.Tape()
        self.stream = t.COMPUTE
        self._live: dict[int, t.Alloc] = {}  # by block
        self._block_of: dict[int, int] = {}  # by storage
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._num_blocks = self._num_events = 0
        self._happened: dict[int, int] = {}  # by stream: the newest event the host knows of
        self._is_recording = False
        self._role = ""
        self._stack = ExitStack()

    # -- the session -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        self._stack.enter_context(CudaKernels())
        self._stack.enter_context(_Watch(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_recording = False
        self._stack.close()

    def begin_tape(self) -> None:
        """What is alive now is what the tape begins with."""
        self.tape = t.Tape(held=list(self._live.values()))
        self._is_recording = True

    def end_tape(self) -> t.Tape:
        self._is_recording = False
        return self.tape

    def add(self, entry: t.Entry) -> None:
        if self._is_recording:
            self.tape.entries.append(entry)

    def mark(self, kind: str, unit: str = "", phase: str = "") -> None:
        self.add(t.Mark(kind, unit, phase))

    def follow(self, model: torch.nn.Module) -> None:
        """The engine's event log goes on the tape, too."""
        for context in contexts_in(model):
            context.log = _MarkingLog(self)

    # -- memory ------------------------------------------------------------------------------------------------------

    def hold(self, tensor: Tensor, what: str) -> int:
        """The block of the tensor's storage; a new one if the storage is new; ``_NO_BLOCK`` for ``elsewhere``."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._block_of.get(key)
        if block is None and self._role == _ELSEWHERE:
            block = self._block_of[key] = _NO_BLOCK
            self._watches[key] = weakref.ref(storage, lambda _: self._let_go(key, _NO_BLOCK))
        elif block is None:
            block = self._num_blocks
            self._num_blocks += 1
            alloc = t.Alloc(block, storage.nbytes(), self.stream, self._role or what)
            self._block_of[key] = block
            self._live[block] = alloc
            self._watches[key] = weakref.ref(storage, lambda _: self._let_go(key, block))
            self.add(alloc)
        return block

    def gradient_blocks(self, model: torch.nn.Module) -> frozenset[int]:
        """Blocks that the model's reduced gradients lie in from step to step."""
        handles = [handle for context in contexts_in(model) for _, handle in context.each_handle()]
        memories = [handle.gradient.memory for handle in handles]
        return frozenset(self._block_of[memory.untyped_storage()._cdata] for memory in memories if memory is not None)

    def use(self, tensor: Tensor) -> None:
        """The current stream works on the tensor, which another may have allocated."""
        self.add(t.UsedOn(self.hold(tensor, "kept"), self.stream))

    def let_go(self, tensor: Tensor) -> None:
        """The host is through with the tensor's block here, whoever still refers to it."""
        block = self._block_of.get(tensor.untyped_storage()._cdata, _NO_BLOCK)
        if self._live.pop(block, None) is not None:
            self.add(t.Free(block))

    def _let_go(self, key: int, block: int) -> None:
        if self._block_of.get(key) == block:
            del self._block_of[key], self._watches[key]
        if self._live.pop(block, None) is not None:
            self.add(t.Free(block))

    @contextmanager
    def role(self, what: str) -> Iterator[None]:
        """Blocks made inside carry ``what`` instead of the operation's name."""
        before, self._role = self._role, what
        try:
            yield
        finally:
            self._role = before

    def elsewhere(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D, with memory that is not this rank's to count: it is on no tape."""
        with self.role(_ELSEWHERE):
            return torch.empty(numel, dtype=dtype, device=_META)

    # -- streams -----------------------------------------------------------------------------------------------------

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def new_event(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def has_happened(self, event: int, stream: int) -> bool:
        return event <= self._happened.get(stream, -1)

    def host_wait(self, event: int, stream: int) -> None:
        self._happened[stream] = max(event, self._happened.get(stream, -1))
        self.add(t.HostWait(event))

    def read_device(self) -> None:
        """The host asks for a value (``item``): it waits for everything on the current stream."""
        event = self.new_event()
        self.add(t.Record(event, self.stream))
        self.host_wait(event, self.stream)

    def all_to_all(self, received: Tensor, sent: Tensor, ranks: tuple[int, ...]) -> None:
        """Outside the engine, in the order of the current stream."""
        event = self.new_event()
        self.add(t.Collective("all_to_all", self.stream, event, max(received.nbytes, sent.nbytes), ranks, "", ""))
        self.add(t.Wait(event, self.stream))

    # -- ranks -------------------------------------------------------------------------------------------------------

    def ranks(
        self,
        rank: int,
        world_size: int,
        is_inline: bool = False,
        shares_memory: bool = False,
        compares_first: bool = False,
    ) -> PretendRanks:
        """To be passed as ``process_group``: this process is ``rank`` of ``world_size`` that exist on paper.

        is_inline: they compute as CPUs do, where everything has happened when a call returns.
        shares_memory: groups inside one host read each other's shards where they lie.
        compares_first: they compare their calls before each collective, as ``collectives`` does over gloo.
        """
        return PretendRanks(self, rank, world_size, is_inline, shares_memory, compares_first)


class _MarkingLog(EventLog):
    """Rows of the engine's event log become marks."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def record(self, kind: str, unit: str = "", phase: str = "", stream: str = "compute", nbytes: int = 0) -> None:
        self._recorder.mark(kind, unit, phase)


class PretendRanks(RankStandIn):
    """Stands for a process group whose other ranks do not exist."""

    def __init__(
        self,
        recorder: Recorder,
        rank: int,
        world_size: int,
        is_inline: bool = False,
        shares_memory: bool = False,
        compares_first: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is none of {world_size} ranks")
        self.recorder, self.rank, self.world_size = recorder, rank, world_size
        self._is_inline, self._shares_memory, self._compares_first = is_inline, shares_memory, compares_first

    def wire(self, ranks: tuple[int, ...], ranks_per_host: int | None) -> Wire:
        if len(ranks) == 1:
            return _RecordedLocalWire(self.recorder)
        is_one_host = len({rank // ranks_per_host if ranks_per_host else 0 for rank in ranks}) == 1
        kind = RecordedSharedMemory if self._shares_memory and is_one_host else RecordedWire
        return kind(self.recorder, ranks, ranks.index(self.rank), ranks_per_host, self._compares_first)

    def streams(self) -> Streams:
        return InlineStreams() if self._is_inline else RecordedStreams(self.recorder)


class _RecordedEvent(Event):
    def __init__(self, recorder: Recorder, number: int, stream: int) -> None:
        self._recorder, self.number, self._stream = recorder, number, stream

    def has_happened(self) -> bool:
        return self._recorder.has_happened(self.number, self._stream)

    def synchronize(self) -> None:
        self._recorder.host_wait(self.number, self._stream)


class RecordedStreams(Streams):
    """The engine's three streams, on paper."""

    is_inline = False

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_gather(self) -> AbstractContextManager[object]:
        return self._recorder.on(t.GATHER)

    def on_reduce(self) -> AbstractContextManager[object]:
        return self._recorder.on(t.REDUCE)

    def record(self) -> Event:
        recorder = self._recorder
        event = _RecordedEvent(recorder, recorder.new_event(), recorder.stream)
        recorder.add(t.Record(event.number, recorder.stream))
        return event

    def wait(self, event: Event) -> None:
        if isinstance(event, _RecordedEvent):
            self._recorder.add(t.Wait(event.number, self._recorder.stream))

    def keep_for_current(self, tensor: Tensor) -> None:
        self._recorder.use(tensor)


class _RecordedWork:
    """What torch's collectives return."""

    def __init__(self, recorder: Recorder, event: int) -> None:
        self._recorder, self._event, self._has_waited = recorder, event, False

    def wait(self) -> None:
        if not self._has_waited:
            self._has_waited = True
            self._recorder.add(t.Wait(self._event, self._recorder.stream))

    def is_completed(self) -> bool:
        return self._has_waited


class RecordedWire(CollectivesWire):
    """Counts and orders like ``collectives`` in a real run; nothing is sent."""

    def __init__(
        self,
        recorder: Recorder,
        ranks: tuple[int, ...],
        group_rank: int,
        ranks_per_host: int | None,
        compares_first: bool,
    ) -> None:
        self._recorder = recorder
        self._take_place(ranks, group_rank, _META, ranks_per_host, compares_first)
        self._calls = _RecordedCalls(recorder, self.ranks, self._gather_small)

    def _call(self, label: Label, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder, event = self._recorder, self._recorder.new_event()
        whole = max(tensor.nbytes for tensor in args if isinstance(tensor, Tensor))
        primitive = _PRIMITIVES[function.__name__]
        recorder.add(t.Collective(primitive, recorder.stream, event, whole, self.ranks, label.unit, label.phase))
        return _RecordedWork(recorder, event)

    def empty(self, numel: int, dtype: torch.dtype, role: BufferRole) -> Tensor:
        with self._recorder.role(f"engine.{role.value}"):
            return super().empty(numel, dtype, role)


class RecordedSharedMemory(RecordedWire):
    """The wire of a host whose ranks read each other's memory: what is gathered is a view of everybody's shards. It
    takes no memory, so the engine keeps it and gathers once a step."""

    def full_view(self, shard: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
        return self._recorder.elsewhere(shard.numel() * self.group_size, dtype or shard.dtype)

    def all_gather(self, full: Tensor, shard: Tensor, label: Label) -> Work:
        """Into a view, or into memory of the caller's; shards are not converted before they are read."""
        self._call(label, dist.all_gather_into_tensor, full, shard).wait()
        return DoneWork()


class _RecordedCalls(CallRecord):
    """The comparison of ranks at the end of backward: its gather, and the host that waits for it before a step."""

    def __init__(self, recorder: Recorder, ranks: tuple[int, ...], gather: Gather) -> None:
        super().__init__(ranks, _META, gather)
        self._recorder = recorder
        self._answer: tuple[int, int] | None = None  # event and its stream
        read_before_steps(self)

    def add(self, primitive: str, label: Label, numel: int) -> None:
        return None  # there is nobody to differ from

    def compare(self) -> None:
        self.read_pending()
        self._gather(torch.empty(2, dtype=torch.int64, device=_META))
        recorder = self._recorder
        self._answer = (recorder.new_event(), recorder.stream)
        recorder.add(t.Record(*self._answer))

    def compare_first(self, gather: Gather) -> None:
        gather(torch.empty(2, dtype=torch.int64, device=_META))

    def read_pending(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            self._recorder.host_wait(*answer)


class _RecordedLocalWire(LocalWire):
    """Of a group of one; what it allocates goes on the tape under its role, too."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(_META)
        self._recorder = recorder

    def empty(self, numel: int, dtype: torch.dtype, role: BufferRole) -> Tensor:
        with self._recorder.role(f"engine.{role.value}"):
            return super().empty(numel, dtype, role)


class _Watch(TorchDispatchMode):
    """Sees every operation on tensors: its cost, and the memory it takes."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            recorder.read_device()
            return 0  # what a device would answer is not known; 0 stands for "nothing was found" (overflows)
        result = func(*args, **kwargs)
        cost = cost_of(func, args, kwargs, result)
        for tensor in cost.on_device:
            recorder.hold(tensor, cost.name)
        if not cost.is_view:
            recorder.add(t.Kernel(cost.name, recorder.stream, cost.flops, cost.nbytes, cost.is_half))
        return result
