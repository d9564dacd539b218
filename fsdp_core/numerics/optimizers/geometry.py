"""Which elements of which original parameter an optimizer parameter holds on this rank.

An optimizer of this package accepts three kinds of parameter, and sees each as a ``Holding``:

=======================  ============================================  =========================================
kind                     from                                          holds
=======================  ============================================  =========================================
``FlatParameter``        ``flat_parameters(model)``                    this rank's shard of one unit
``FlatSlice``            ``parameter_groups(flat_parameters(..), ..)`` a run of original parameters of such a shard
``ShardedTensor``        ``model.parameters()`` after sharding         this rank's part of one original parameter
plain tensor             a model that is not sharded                   one whole original parameter
=======================  ============================================  =========================================

Elements are counted in memory order, spans are half-open. Every rank of a sharding group sees the same holdings and
pieces in the same order, also where its own part is empty: collectives rely on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_core.comm.wire import Wire
from fsdp_core.errors import NumericsError
from fsdp_core.handle.flat_parameter import FlatParameter
from fsdp_core.handle.sharded_tensor import ShardedTensor


@dataclass(frozen=True, eq=False)
class Home:
    """The flat parameter of which a holding is a part.

    key: the same number for holdings of one flat parameter.
    wire: of its sharding group; shard_numel: elements of one rank's shard (F of them make the flat parameter).
    """

    key: int
    wire: Wire
    shard_numel: int


@dataclass(frozen=True, eq=False)
class Piece:
    """This rank's part of one original parameter.

    start, end: elements of the original parameter. offset: where they begin in the holding's local data.
    flat_start: where the original parameter begins in the flat parameter.
    """

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    end: int
    offset: int
    flat_start: int

    @property
    def numel(self) -> int:
        """Elements of the whole original parameter."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    def of(self, local: Tensor) -> Tensor:
        """This piece of a holding's local data, 1-D."""
        return local[self.offset : self.offset + self.end - self.start]

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's elements, 1-D, of a tensor of the original shape."""
        if whole.stride() != self.stride:
            whole = torch.empty_strided(self.shape, self.stride, dtype=whole.dtype, device=whole.device).copy_(whole)
        return whole.as_strided((self.numel,), (1,))[self.start : self.end]

    def whole(self, flat: Tensor) -> Tensor:
        """The original parameter inside a gathered flat parameter, in its own shape and stride."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.flat_start)


@dataclass(frozen=True, eq=False)
class Holding:
    """One optimizer parameter. ``home`` is ``None`` for parameters that are not sharded."""

    param: Tensor
    pieces: tuple[Piece, ...]
    home: Home | None
    shard_offset: int  # where its local data begins in the shard

    def local(self, tensor: Tensor) -> Tensor:
        """The 1-D data of the parameter itself, its gradient, or state made like it. A view, except of a gradient
        whose strides differ from the parameter's."""
        if isinstance(tensor, ShardedTensor):
            return tensor.local
        if isinstance(self.param, FlatParameter):
            return tensor.detach()
        tensor = tensor.detach()
        if tensor.stride() != self.param.stride():
            like_param = torch.empty_strided(
                self.param.shape, self.param.stride(), dtype=tensor.dtype, device=tensor.device
            )
            tensor = like_param.copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    @property
    def data(self) -> Tensor:
        return self.local(self.param)

    @property
    def grad(self) -> Tensor | None:
        grad = self.param.grad
        return None if grad is None else self.local(grad)


def holding_of(param: Tensor) -> Holding:
    """See the module's docstring.

    Raises:
        NumericsError: a plain parameter with gaps or overlaps in memory.
    """
    if isinstance(param, FlatParameter):
        return _flat_holding(param)
    if isinstance(param, ShardedTensor):
        span, handle = param.spec.span, param.owner
        start = next(s.start for s in handle.layout.segments if s.fqn == param.spec.fqn)
        piece = Piece(param.spec.fqn, tuple(param.spec.shape), param.spec.stride, span.start, span.end, 0, start)
        home = Home(id(handle), param.spec.wire, handle.layout.shard_numel)
        return Holding(param, (piece,), home, span.shard_start)
    numel = param.numel()
    if param.untyped_storage().nbytes() // param.itemsize - param.storage_offset() < numel or not _is_dense(param):
        raise NumericsError(
            "A parameter does not fill its memory once",
            expected="a dense tensor",
            got=f"shape {tuple(param.shape)}, strides {param.stride()}",
            remedy="make the parameter contiguous before the optimizer is built",
        )
    return Holding(param, (Piece("", tuple(param.shape), param.stride(), 0, numel, 0, 0),), None, 0)


def _flat_holding(param: FlatParameter) -> Holding:
    base, shard_offset = param.base, param.shard_offset
    pieces = tuple(
        Piece(
            part.segment.fqn,
            part.segment.shape,
            part.segment.stride,
            part.span.start,
            part.span.end,
            part.span.shard_start - shard_offset if part.span.numel else 0,
            part.segment.start,
        )
        for part in param.segments
    )
    return Holding(param, pieces, Home(id(base), param.wire, base.numel()), shard_offset)


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride != expected:
                return False
            expected *= extent
    return True


def in_buckets(holdings: Sequence[Holding], limit_bytes: int) -> Iterator[list[Holding]]:
    """Runs of holdings whose shards together stay within a limit (one holding at least): scratch memory is bounded
    by it, and each run costs one collective. Sizes are those of whole shards, so all ranks cut alike."""
    bucket: list[Holding] = []
    keys: set[int] = set()
    num_bytes = 0
    for holding in holdings:
        key = id(holding) if holding.home is None else holding.home.key
        numel = holding.param.numel() if holding.home is None else holding.home.shard_numel
        more = 0 if key in keys else numel * holding.param.itemsize
        if bucket and num_bytes + more > limit_bytes:
            yield bucket
            bucket, keys, num_bytes = [], set(), 0
            more = numel * holding.param.itemsize
        bucket.append(holding)
        keys.add(key)
        num_bytes += more
    if bucket:
        yield bucket
