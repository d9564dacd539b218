"""Streams and events behind one small interface: CUDA's, or inline on devices that have none.

Three streams. *compute* is whatever stream the user runs on. *gather* carries conversions into the compute dtype
and all-gathers; *reduce* carries reduce-scatters, all-reduces and accumulation. On CPU all three are the caller
itself: work is in order by construction and an event has always happened.
"""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class Event(abc.ABC):
    """A point on a stream."""

    is_immediate = False  # True: the device cannot lag behind the host, all ranks know this event has happened

    @abc.abstractmethod
    def has_happened(self) -> bool: ...

    @abc.abstractmethod
    def synchronize(self) -> None:
        """The host waits."""


class Streams(abc.ABC):
    """The three streams of one root."""

    is_inline: bool

    @abc.abstractmethod
    def on_gather(self) -> AbstractContextManager[object]:
        """Work in this block is put on the gather stream."""

    @abc.abstractmethod
    def on_reduce(self) -> AbstractContextManager[object]:
        """Work in this block is put on the reduce stream."""

    @abc.abstractmethod
    def record(self) -> Event:
        """An event behind what has been put on the current stream."""

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """The current stream waits for ``event``; the host does not."""

    @abc.abstractmethod
    def keep_for_current(self, tensor: Tensor) -> None:
        """Tell the allocator that the current stream still uses ``tensor``, whoever allocated it."""


class _Happened(Event):
    is_immediate = True

    def has_happened(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


HAPPENED = _Happened()
_INLINE = nullcontext()


class InlineStreams(Streams):
    """No streams: everything happens in the order of the calls."""

    is_inline = True

    def on_gather(self) -> AbstractContextManager[object]:
        return _INLINE

    def on_reduce(self) -> AbstractContextManager[object]:
        return _INLINE

    def record(self) -> Event:
        return HAPPENED

    def wait(self, event: Event) -> None:
        return None

    def keep_for_current(self, tensor: Tensor) -> None:
        return None


class _CudaEvent(Event):
    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(device))

    def has_happened(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaStreams(Streams):
    """Two side streams of high priority beside the user's own."""

    is_inline = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gather = torch.cuda.Stream(device=device, priority=-1)
        self._reduce = torch.cuda.Stream(device=device, priority=-1)

    def on_gather(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._gather)

    def on_reduce(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._reduce)

    def record(self) -> Event:
        return _CudaEvent(self._device)

    def wait(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            torch.cuda.current_stream(self._device).wait_event(event.event)

    def keep_for_current(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))


def streams_for(device: torch.device) -> Streams:
    """The streams that fit ``device``."""
    return CudaStreams(device) if device.type == "cuda" else InlineStreams()
