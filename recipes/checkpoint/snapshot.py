"""A copy of this rank's share in host memory, so that training may go on while it is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipes.checkpoint.safe_file import Entry


class HostCopy:
    """One buffer, kept from save to save: as large as this rank's share of the state, pinned where it comes from CUDA.

    The caller must be done with the last copy before the next is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: Tensor | None = None

    def take(self, entries: Sequence[Entry]) -> list[Entry]:
        """The same entries over this buffer; they must come in file order (wide elements first: all are aligned).
        On CUDA ordered behind the current stream; the host waits until the copy has arrived."""
        total = sum(entry.num_bytes for entry in entries)
        if self._buffer is None or self._buffer.numel() < total:
            self._buffer = None  # freed before the larger one is made
            self._buffer = torch.empty(total, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        copies, offset = [], 0
        for entry in entries:
            stop = offset + entry.num_bytes
            copy = self._buffer[offset:stop].view(entry.values.dtype)
            copy.copy_(entry.values, non_blocking=True)
            copies.append(Entry(entry.key, copy))
            offset = stop
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copies
