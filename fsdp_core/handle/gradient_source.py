"""Where the unsharded gradients of one flat parameter are put, until the first wire of a reduction has read them."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp_core.comm.memory import Buffer
from fsdp_core.comm.wire import BufferRole, Wire

if TYPE_CHECKING:
    from fsdp_core.handle.flat_param_handle import FlatParamHandle


@dataclass(eq=False)
class Collection:
    """Gradients of one node that were put into a source ahead of the others."""

    node: Any
    source: Buffer
    indices: set[int] = field(default_factory=set)


class GradientSources:
    """Sources are buffers of [padded_numel] in the reduce dtype; with F = 1 one may be the gradient's own memory."""

    def __init__(self, handle: FlatParamHandle) -> None:
        self.handle = handle
        self._collection: Collection | None = None

    @property
    def _wire(self) -> Wire:
        """The one that reads them."""
        handle = self.handle
        return handle.wire if handle.wire.group_size > 1 else handle.replicate_wire

    def acquire(self, *, becomes_gradient: bool = False) -> Buffer:
        """Memory for unsharded gradients. ``becomes_gradient``: they are reduced next, and what is not scattered
        (F = 1) may be reduced where it will stay."""
        handle = self.handle
        if becomes_gradient and handle.wire.group_size == 1:
            own = handle.gradient.claim_target(handle.dtypes.reduce)
            if own is not None:
                return own
        return handle.resources.pool.acquire(
            self._wire, handle.layout.padded_numel, handle.dtypes.reduce, BufferRole.GRAD_FULL
        )

    def release(self, buffer: Buffer) -> None:
        if not self.handle.gradient.owns(buffer):
            self.handle.resources.pool.release(self._wire, buffer, BufferRole.GRAD_FULL)

    def _views(self, buffer: Buffer) -> list[Tensor]:
        return buffer.cached(("full", self.handle.views_key), self.handle.make_views)

    def collect(self, node: Any, index: int, grad: Tensor) -> bool:
        """Put one gradient of ``node`` where the others of its unit will follow (``collected``). False if it cannot
        be put there, or another node is at it."""
        if self._collection is None:
            self._collection = Collection(node, self.acquire(becomes_gradient=True))
        collection = self._collection
        if collection.node is not node or grad.layout != torch.strided:
            return False
        view = self._views(collection.source)[index]
        if index in collection.indices:
            view.add_(grad)
        else:
            view.copy_(grad)
            collection.indices.add(index)
        return True

    def collected(self, node: Any, grads: dict[int, Tensor]) -> Buffer:
        """All gradients of ``node``: what was put there before, and ``grads``, by segment index."""
        collection = self._collection
        if collection is None or collection.node is not node:
            source = self.acquire(becomes_gradient=True)
            self.fill(source, grads, add=False)
            return source
        self._collection = None
        twice = {index: grads.pop(index) for index in list(grads) if index in collection.indices}
        self.fill(collection.source, grads, add=False, kept=collection.indices)
        self.fill(collection.source, twice, add=True)
        return collection.source

    def drop_collection(self) -> None:
        """A backward failed."""
        collection, self._collection = self._collection, None
        if collection is not None:
            if self.handle.gradient.owns(collection.source):
                self.handle.gradient.drop_target()
            self.release(collection.source)

    def fill(self, buffer: Buffer, grads: dict[int, Tensor], *, add: bool, kept: Set[int] = frozenset()) -> None:
        """Copy (or add) unsharded gradients, by segment index, into a gradient source; absent ones are zeros, but
        for those ``kept``."""
        views = self._views(buffer)
        present = list(grads)
        targets = [views[index] for index in present]
        sources = [grads[index] for index in present]
        if add:
            _add_all(targets, sources)
            return
        if len(present) < len(views):
            for index, view in enumerate(views):
                if index not in grads and index not in kept:
                    view.zero_()
        layout = self.handle.layout
        if layout.padding_numel:
            buffer.tensor[layout.numel :].zero_()
        if targets:
            torch._foreach_copy_(targets, sources)


def _add_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    if not targets:
        return
    if all(source.dtype == target.dtype for source, target in zip(sources, targets, strict=True)):
        torch._foreach_add_(targets, sources)
    else:
        for target, source in zip(targets, sources, strict=True):
            target.add_(source)
