"""What ranks agree on at the end of every step: is it time to stop, is it time to save.

Each rank has wishes of its own: a signal reached this one, that one's clock says the time limit is near. They travel
in the one sum that every step has anyway (the count of its targets, ``recipes.step``), so agreement costs no message.
On CUDA reading the sum would make the host wait for the device: it is copied to the host beside the computation and
read at the end of the *next* step, on every rank alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.ranks import Ranks
from recipes.stop import StopRequest

# Before a save has been timed: this long, or a tenth of what is left at the start of the steps if that is less.
UNKNOWN_SAVE_S = 60.0
_SAVE_MARGIN = 1.5  # a save may take longer than the ones before it
# An evaluation asks this often whether it must be cut short: every so many of its forwards, on every rank alike.
FORWARDS_BETWEEN_ROUNDS = 8


@dataclass(frozen=True)
class Agreed:
    """The same on every rank. stop: leave at this boundary. save: a checkpoint by the clock is due."""

    stop: bool = False
    save: bool = False


class Boundary:
    """One rank's part of the agreement.

    is_save_due: asked on rank 0 alone, once a step (by the clock; saves by step number need no agreement).
    save_s: measured seconds of a save, None before the first.
    """

    def __init__(
        self,
        ranks: Ranks,
        stop: StopRequest,
        is_save_due: Callable[[], bool] = lambda: False,
        save_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._ranks, self._stop = ranks, stop
        self._is_save_due, self._save_s = is_save_due, save_s
        self._own = Agreed()
        self._on_its_way: tuple[Tensor, torch.cuda.Event] | None = None
        self._last_boundary: float | None = None
        self._longest_gap_s = 0.0
        self._unknown_save_s = UNKNOWN_SAVE_S
        if stop.ends_at is not None:
            self._unknown_save_s = min(UNKNOWN_SAVE_S, max(0.0, stop.ends_at - time.monotonic()) / 10)

    def wishes(self) -> tuple[float, float]:
        """To be summed over ranks during the step that begins now: (stop, save), 0 or 1 each."""
        self._own = Agreed(self._wants_stop(), self._ranks.is_main and self._is_save_due())
        return float(self._own.stop), float(self._own.save)

    def agree(self, summed: Tensor) -> Agreed:
        """At the end of the step. ``summed``: [2], the wishes of all ranks."""
        if self._ranks.world_size == 1:
            agreed = Agreed(self._wants_stop(), self._own.save)  # nobody to ask: what came during the step counts
        elif summed.device.type == "cpu":
            agreed = _decided(summed)
        else:
            agreed = self._last_steps(summed)
        return self._heeding(agreed)

    def before_the_first_step(self) -> Agreed:
        """A round of its own: signals during start-up and data preparation."""
        return self._round()

    def _round(self) -> Agreed:
        """An agreement outside a step, with a message of its own."""
        wishes = torch.tensor([float(self._wants_stop()), 0.0], dtype=torch.float64, device=self._ranks.device)
        return self._heeding(_decided(self._ranks.sum(wishes)))

    def is_evaluation_over(self, forwards: int) -> bool:
        """After so many forwards of an evaluation: must it be cut short, because a rank was asked to stop?"""
        return forwards % FORWARDS_BETWEEN_ROUNDS == 0 and self._round().stop

    def reason(self) -> str:
        """Who asked, in words. Collective; after an agreement to stop."""
        asked = [(rank, why) for rank, why in enumerate(self._ranks.exchange(self._why())) if why is not None]
        whys = sorted({why for _, why in asked})
        if len(asked) in (0, self._ranks.world_size) or not whys[0].startswith("SIG"):
            return " and ".join(whys) or "a signal"
        return f"{' and '.join(whys)} to rank {', '.join(str(rank) for rank, _ in asked)}"

    def _wants_stop(self) -> bool:
        self._note_time()
        return self._why() is not None

    def _why(self) -> str | None:
        if self._stop.why is None and self._is_time_up():
            self._stop.ask("the time limit (cluster.time_limit)")
        return self._stop.why

    def _is_time_up(self) -> bool:
        """Whether a save begun after the longest stretch between boundaries so far might come too late."""
        if self._stop.ends_at is None:
            return False
        save_s = self._save_s()
        needed_s = self._unknown_save_s if save_s is None else _SAVE_MARGIN * save_s
        return time.monotonic() + 2 * self._longest_gap_s + needed_s >= self._stop.ends_at

    def _note_time(self) -> None:
        now = time.monotonic()
        if self._last_boundary is not None:
            self._longest_gap_s = max(self._longest_gap_s, now - self._last_boundary)
        self._last_boundary = now

    def _last_steps(self, summed: Tensor) -> Agreed:
        """What the previous step's sum said, and this one's sent on its way to the host."""
        before = self._on_its_way
        host = torch.empty(summed.shape, dtype=summed.dtype, pin_memory=True)
        host.copy_(summed, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._on_its_way = (host, event)
        if before is None:
            return Agreed()
        before[1].synchronize()  # long done: a whole step was issued since
        return _decided(before[0])

    def _heeding(self, agreed: Agreed) -> Agreed:
        if agreed.stop:
            self._stop.heed()
        return agreed


def _decided(summed: Tensor) -> Agreed:
    stop, save = (not math.isclose(value, 0.0) for value in summed.tolist())
    return Agreed(stop, save)
