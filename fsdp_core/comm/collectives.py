"""The wire on torch.distributed's own collectives (NCCL, gloo, and any other backend)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_core.comm.identity import CallRecord
from fsdp_core.comm.wire import DoneWork, Label, ReduceOp, Wire, WireCounter, Work
from fsdp_core.errors import WireError

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_DONE = DoneWork()


def single_tensor_collective(new_name: str, old_name: str) -> Callable[..., Any]:
    """torch 2.13 renamed the two single-tensor collectives and warns on the old names; older releases lack the new."""
    # looked up at call time, so that tests and tools may replace it in torch.distributed
    return getattr(dist, new_name, None) or getattr(dist, old_name)


def as_plain(tensor: Tensor) -> Tensor:
    """A view that every backend can move: bytes for dtypes that are only copied, never summed."""
    if tensor.dtype.is_complex or tensor.dtype == torch.bool or tensor.element_size() == 1:
        return tensor.view(torch.uint8)
    return tensor


def as_summable(tensor: Tensor) -> Tensor:
    """Complex numbers are summed as pairs of reals."""
    return tensor.view(tensor.real.dtype) if tensor.dtype.is_complex else tensor


def _average(result: Tensor, divisor: float) -> tuple[Tensor, float] | None:
    return None if divisor == 1 else (result, divisor)


class _TorchWork(Work):
    """One torch work; its failure is told with the label of the collective."""

    __slots__ = ("_average", "_keep", "_label", "_wire", "_work")

    def __init__(
        self,
        work: Any,
        label: Label,
        wire: CollectivesWire,
        keep: Tensor | None = None,
        average: tuple[Tensor, float] | None = None,
    ) -> None:
        self._work, self._label, self._wire, self._keep, self._average = work, label, wire, keep, average

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._wire.failure(error, self._label) from error
        if self._average is not None:
            result, divisor = self._average
            result.div_(divisor)  # on the waiting stream, which is behind the collective now
        self._work = self._keep = self._average = None

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


class CollectivesWire(Wire):
    """Uses whatever ``torch.distributed`` offers for the group's backend. Labels are compared at ``quiesce``.

    Args:
        compares_first: compare them before every collective as well, for a backend that ends the process when
            collectives of unlike sizes meet (gloo does). Ranks then wait for each other where a collective begins.
    """

    name = "collectives"

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        device: torch.device,
        ranks_per_host: int | None = None,
        *,
        compares_first: bool = False,
    ) -> None:
        self.group = group
        self._take_place(ranks, dist.get_rank(group), device, ranks_per_host, compares_first)

    def _take_place(
        self,
        ranks: Sequence[int],
        group_rank: int,
        device: torch.device,
        ranks_per_host: int | None,
        compares_first: bool,
    ) -> None:
        self._compares_first = compares_first
        self.ranks = tuple(ranks)
        self.group_size, self.group_rank = len(self.ranks), group_rank
        self._device = device
        self.counter = WireCounter()
        hosts = [rank // ranks_per_host if ranks_per_host else 0 for rank in self.ranks]
        peers = self.group_size - 1
        same = sum(1 for host in hosts if host == hosts[self.group_rank]) - 1
        self._intra_share = (same / peers) if peers else 1.0
        self._calls = CallRecord(self.ranks, device, self._gather_small)

    @property
    def device(self) -> torch.device:
        return self._device

    def failure(self, error: BaseException, label: Label) -> WireError:
        """What went wrong, with the unit and the phase, for every rank that notices."""
        return WireError(
            f"A collective failed in phase {label.phase!r}: {str(error).splitlines()[0][:300]}",
            unit=label.unit or None,
            expected=f"all of ranks {list(self.ranks)} in the same collective",
            got="an error or a timeout; a peer left, failed, or runs a different sequence of units",
            remedy="read the first error of the other ranks; check that all ranks run the same units and batches",
        )

    def _count(self, primitive: str, nbytes: float) -> None:
        intra = round(nbytes * self._intra_share)
        self.counter.record(primitive, intra, round(nbytes) - intra)

    def _begin(self, primitive: str, label: Label, numel: int) -> None:
        """A collective of ``numel`` elements is next. Raises ``MismatchError`` where it is known to meet another."""
        self._calls.add(primitive, label, numel)
        if self._compares_first:
            self._calls.compare_first(functools.partial(self._gather_small, unit=label.unit))

    def _call(self, label: Label, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Starts a collective; ``function`` is torch.distributed's."""
        try:
            return function(*args, group=self.group, async_op=True, **kwargs)
        except RuntimeError as error:
            raise self.failure(error, label) from error

    def all_gather(self, full: Tensor, shard: Tensor, label: Label) -> Work:
        if full.dtype != shard.dtype:  # convert into this rank's place and gather in place
            place = full.narrow(0, self.group_rank * shard.numel(), shard.numel())
            shard = place.copy_(shard)
        self._begin("all_gather", label, full.numel())
        self._count("all_gather", shard.nbytes * (self.group_size - 1))
        gather = single_tensor_collective("all_gather_single", "all_gather_into_tensor")
        return _TorchWork(self._call(label, gather, as_plain(full), as_plain(shard)), label, self, keep=shard)

    def reduce_scatter(self, shard: Tensor, full: Tensor, label: Label, divisor: float = 1.0) -> Work:
        self._begin("reduce_scatter", label, full.numel())
        self._count("reduce_scatter", shard.nbytes * (self.group_size - 1))
        scatter = single_tensor_collective("reduce_scatter_single", "reduce_scatter_tensor")
        work = self._call(label, scatter, as_summable(shard), as_summable(full))
        return _TorchWork(work, label, self, full, _average(shard, divisor))

    def all_reduce(self, tensor: Tensor, label: Label, op: ReduceOp = "sum", divisor: float = 1.0) -> Work:
        self._begin("all_reduce", label, tensor.numel())
        # a ring all-reduce sends every element twice, less the share a rank already has
        self._count("all_reduce", 2 * tensor.nbytes * (self.group_size - 1) / self.group_size)
        work = self._call(label, dist.all_reduce, as_summable(tensor), op=_OPS[op])
        return _TorchWork(work, label, self, tensor, _average(tensor, divisor))

    def broadcast(self, tensor: Tensor, src: int, label: Label) -> Work:
        if tensor.numel() == 0:
            return _DONE
        self._begin("broadcast", label, tensor.numel())
        self._count("broadcast", tensor.nbytes if self.group_rank == src else 0)
        return _TorchWork(self._call(label, dist.broadcast, as_plain(tensor), src=self.ranks[src]), label, self)

    def _gather_small(self, mine: Tensor, unit: str = "") -> list[Tensor]:
        """``mine`` of every rank, in group order."""
        label = Label(-1, "quiesce", unit)
        full = mine.new_empty(mine.numel() * self.group_size)
        gather = single_tensor_collective("all_gather_single", "all_gather_into_tensor")
        _TorchWork(self._call(label, gather, full, mine), label, self).wait()
        return list(full.chunk(self.group_size))

    def quiesce(self) -> None:
        """Nothing of this rank is read after ``wait``; what is left to do is to compare the ranks' calls."""
        self._calls.compare()

    def close(self) -> None:
        return None
