"""Small sums, maxima and gathers over all ranks of the run, for counts, metrics and decisions.

The engine moves parameters and gradients over its own wires; this is only for a few numbers a step.
With one rank nothing is sent and no process group is needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.context import RankContext
from recipes.flight import NO_FLIGHT, FlightRecorder


class Pending:
    """A sum on its way: ``wait()`` gives the tensor it was started with, now the sum over ranks."""

    def __init__(self, tensor: Tensor, work: dist.Work | None, flight: FlightRecorder) -> None:
        self._tensor, self._work, self._flight = tensor, work, flight

    def wait(self) -> Tensor:
        """CPU: blocks. CUDA: orders the current stream behind the sum, the host does not wait."""
        if self._work is not None:
            self._flight.event("await_sum")
            self._work.wait()
            self._work = None
        return self._tensor


@dataclass(frozen=True)
class Ranks:
    """All ranks of the run (the default process group), and where their tensors live."""

    rank: int
    world_size: int
    device: torch.device
    flight: FlightRecorder = NO_FLIGHT

    @classmethod
    def of(cls, context: RankContext) -> Ranks:
        if context.world_size > 1 and not dist.is_initialized():
            raise RuntimeError(
                f"rank {context.rank} of {context.world_size}: no process group exists; "
                "the launcher makes it before a recipe starts"
            )
        return cls(context.rank, context.world_size, torch.device(context.device), context.flight)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def start_sum(self, tensor: Tensor) -> Pending:
        """In place, any shape and dtype; overlaps with what the caller does until ``wait()``."""
        if self.world_size == 1:
            return Pending(tensor, None, self.flight)
        self.flight.event("sum")
        return Pending(tensor, dist.all_reduce(tensor, async_op=True), self.flight)

    def sum(self, tensor: Tensor) -> Tensor:
        """In place, same bits on every rank."""
        return self.start_sum(tensor).wait()

    def count(self, number: int) -> int:
        """The sum of every rank's number."""
        return int(self.sum(torch.tensor(number, dtype=torch.int64, device=self.device)))

    def max(self, tensor: Tensor) -> Tensor:
        """Elementwise, in place."""
        if self.world_size > 1:
            self.flight.event("max")
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """``[n, ...]`` on every rank (same n) -> ``[W * n, ...]`` in rank order, on every rank."""
        if self.world_size == 1:
            return tensor
        self.flight.event("collect")
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def exchange(self, fact: Any) -> list[Any]:
        """Every rank's fact (plain JSON, any size), in rank order, on every rank. Waits for the device."""
        if self.world_size == 1:
            return [fact]
        own = torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8).to(self.device)
        lengths = self.gather(torch.tensor([own.numel()], device=self.device)).tolist()
        longest = max(lengths)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: own.numel()] = own
        rows = self.gather(padded).cpu().view(self.world_size, longest)
        return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]

    def tell(self, fact: Any) -> Any:
        """Rank 0's fact, on every rank."""
        return self.exchange(fact if self.is_main else None)[0]

    def barrier(self) -> None:
        if self.world_size > 1:
            self.sum(torch.zeros(1, device=self.device))
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
