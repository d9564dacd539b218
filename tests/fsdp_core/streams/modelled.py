"""CUDA's streams played on the CPU: the same engine code, with events that lag and a check of every access.

Work runs at once, in the order of the calls, as on any CPU; what is modelled is which order a GPU would have been
*bound* to. Each stream, and each wire (NCCL runs collectives on a stream of its own), has a clock; events and waits
carry clocks from one to another. An access to memory that the engine manages, which is not ordered behind an earlier
conflicting access on another stream, is a race, and is recorded.

How far the device lags behind the host is a policy: ``has_happened`` may say no until the host waits, always yes, or
anything in between. No decision of the engine may depend on it, or ranks would issue different collectives.
"""

from __future__ import annotations

import random
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_core.comm import collectives, memory
from fsdp_core.comm.streams import Event, Streams
from fsdp_core.handle import shard_gradient
from fsdp_core.handle.flat_param_handle import FlatParamHandle
from fsdp_core.runtime import build
from tests.support.ranks import ROOT

Clock = dict[str, int]
ENGINE = str(ROOT / "fsdp_core")
LAGS: dict[str, Callable[[random.Random], bool]] = {
    "far behind": lambda source: False,
    "close behind": lambda source: True,
    "now and then": lambda source: source.random() < 0.5,
}


def merge(into: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        into[stream] = max(into.get(stream, 0), tick)


class Device:
    """All clocks, what was last done to each tracked storage, and the races found."""

    def __init__(self, lag: str, seed: int) -> None:
        self.clocks: dict[str, Clock] = {"compute": {}, "gather": {}, "reduce": {}}
        self.host: Clock = {}  # what the host has waited for: everything issued later comes behind it
        self.current = "compute"
        self.writes: dict[int, tuple[str, int, str]] = {}
        self.reads: dict[int, dict[str, tuple[int, str]]] = {}
        self.tracked: dict[int, str] = {}
        self.races: list[str] = []
        self.is_paused = False  # inside a backend, whose own copies are no work of the engine's
        self._lag, self._source = LAGS[lag], random.Random(seed)

    def has_happened(self) -> bool:
        return self._lag(self._source)

    def track(self, tensor: Tensor, name: str) -> None:
        """From now on, and as a new piece of memory."""
        address = tensor.untyped_storage().data_ptr()
        self.tracked[address] = name
        self.writes.pop(address, None)
        self.reads.pop(address, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def forget(self, address: int) -> None:
        self.tracked.pop(address, None)

    def access(self, tensor: Tensor, is_write: bool, stream: str, what: str) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address not in self.tracked or self.is_paused:
            return
        clock = self.clocks[stream]
        merge(clock, self.host)
        tick = clock[stream] = clock.get(stream, 0) + 1
        written = self.writes.get(address)
        if written is not None:
            self._check(address, clock, written, stream, what)
        if is_write:
            for other, (at, whose) in self.reads.pop(address, {}).items():
                self._check(address, clock, (other, at, whose), stream, what)
            self.writes[address] = (stream, tick, what)
        else:
            self.reads.setdefault(address, {})[stream] = (tick, what)

    def _check(self, address: int, clock: Clock, earlier: tuple[str, int, str], stream: str, what: str) -> None:
        other, at, whose = earlier
        if other != stream and clock.get(other, 0) < at:
            frames = [
                f for f in traceback.extract_stack() if "/fsdp_core/" in f.filename and "/tests/" not in f.filename
            ]
            where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in frames[-1:-5:-1])
            self.races.append(f"{self.tracked[address]}: {what} on {stream} races {whose} on {other} ({where})")


class ModelEvent(Event):
    def __init__(self, device: Device) -> None:
        self.device, self.clock = device, dict(device.clocks[device.current])
        merge(self.clock, device.host)

    def has_happened(self) -> bool:
        if self.device.has_happened():
            merge(self.device.host, self.clock)
            return True
        return False

    def synchronize(self) -> None:
        merge(self.device.host, self.clock)


class ModelStreams(Streams):
    is_inline = False

    def __init__(self, device: Device) -> None:
        self.device = device

    @contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        before, self.device.current = self.device.current, stream
        try:
            yield
        finally:
            self.device.current = before

    def on_gather(self) -> Any:
        return self._on("gather")

    def on_reduce(self) -> Any:
        return self._on("reduce")

    def record(self) -> Event:
        return ModelEvent(self.device)

    def wait(self, event: Event) -> None:
        if isinstance(event, ModelEvent):
            merge(self.device.clocks[self.device.current], event.clock)

    def keep_for_current(self, tensor: Tensor) -> None:
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelStreams:
        return self


class _ModelWork:
    """A collective on the wire's own stream: waiting orders the current stream behind it, not the host."""

    def __init__(self, work: Any, device: Device, clock: Clock) -> None:
        self._work, self._device, self._clock = work, device, clock

    def wait(self) -> None:
        with self._device.paused():
            self._work.wait()
        merge(self._device.clocks[self._device.current], self._clock)

    def is_completed(self) -> bool:
        return self._work.is_completed()


class Watch(TorchDispatchMode):
    """Tells the device what each operation reads and writes."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view or func._schema.name.startswith("c10d"):
            return result
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    for tensor in [leaf.local] if hasattr(leaf, "local") else [leaf]:
                        self.device.access(tensor, is_write, self.device.current, func._schema.name)
        return result


def _modelled_call(device: Device) -> Callable[..., Any]:
    original = collectives.CollectivesWire._call

    def call(wire: Any, label: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        stream = f"wire of {wire.ranks}"
        clock = device.clocks.setdefault(stream, {})
        merge(clock, device.clocks[device.current])
        what = f"{getattr(function, '__name__', 'collective')} of {label.unit} in {label.phase}"
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        for tensor in tensors[1:]:
            device.access(tensor, False, stream, what)
        for tensor in tensors[:1]:
            device.access(tensor, True, stream, what)
        with device.paused():
            work = original(wire, label, function, *args, **kwargs)
        return _ModelWork(work, device, dict(clock))

    return call


@contextmanager
def modelled_device(lag: str, seed: int = 0) -> Iterator[Device]:
    """Models sharded inside the block run on modelled streams; use ``wire="collectives"``."""
    device = Device(lag, seed)

    class TrackedBuffer(memory.Buffer):
        __slots__ = ("__weakref__",)

        def __init__(self, storage: Tensor) -> None:
            super().__init__(storage)
            device.track(storage, f"buffer of {storage.numel()} x {storage.dtype}")
            weakref.finalize(self, device.forget, storage.untyped_storage().data_ptr())

    allocate = FlatParamHandle._allocate_sharded

    def allocate_sharded(handle: FlatParamHandle, where: torch.device) -> Tensor:
        sharded = allocate(handle, where)
        device.track(sharded, f"shard of {handle.unit_name}")
        return sharded

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(build, "streams_of", return_value=ModelStreams(device)))
        stack.enter_context(mock.patch.object(memory, "Buffer", TrackedBuffer))
        stack.enter_context(mock.patch.object(shard_gradient, "Buffer", TrackedBuffer))
        stack.enter_context(mock.patch.object(FlatParamHandle, "_allocate_sharded", allocate_sharded))
        stack.enter_context(mock.patch.object(collectives.CollectivesWire, "_call", _modelled_call(device)))
        stack.enter_context(Watch(device))
        yield device
