"""What people see while a run goes on: a progress bar on a terminal, plain lines otherwise. Rank 0 only."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from recipes.context import RankContext
from recipes.metrics.ledger import Line


class Report:
    """Silent on other ranks. Everything is flushed, so that a log file is never behind."""

    def __init__(self, is_main: bool, is_interactive: bool) -> None:
        self._is_main, self._is_interactive = is_main, is_main and is_interactive
        self._bar: tqdm | None = None

    @classmethod
    def of(cls, context: RankContext) -> Report:
        return cls(context.is_main, context.is_interactive)

    def line(self, text: str) -> None:
        if not self._is_main:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
            sys.stdout.flush()
        else:
            print(text, flush=True)

    def begin_steps(self, first: int, last: int) -> None:
        """Steps [first, last) follow."""
        if self._is_interactive:
            self._bar = tqdm(total=last, initial=first, unit="step", dynamic_ncols=True, file=sys.stderr)

    def step_done(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def progress(self, lines: Sequence[Line], last: int) -> None:
        """The steps since the last log: the bar's right end, or one plain line."""
        if not self._is_main or not lines:
            return
        text = progress_text(lines)
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        else:
            print(f"step {lines[-1]['step']:>{len(str(last))}}/{last}  {text}", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def progress_text(lines: Sequence[Line]) -> str:
    """loss, lr and norm of the last step; speed and parts of time over all of ``lines``."""
    last = lines[-1]
    seconds = total(lines, "step_s")
    unit, short = ("tokens_per_s", "tok/s") if "tokens_per_s" in last else ("samples_per_s", "samples/s")
    done = sum(float(line[unit] or 0) * float(line["step_s"] or 0) for line in lines)
    norm = f"norm {last['grad_norm']:.2f}"
    if last.get("overflowed"):
        norm = f"overflow at loss scale {last['loss_scale']:g}, update left out"
    parts = [f"loss {last['loss']:.4f}", norm, f"lr {last['lr']:.2e}"]
    parts += [f"{amount(done / seconds)} {short}", f"{seconds / len(lines) * 1e3:.0f} ms/step"]
    if last.get("mfu") is not None:
        parts.append(f"mfu {100 * float(last['mfu'] or 0):.1f}%")
    return "  ".join(parts)


def total(lines: Sequence[Line], name: str) -> float:
    return sum(float(line[name] or 0.0) for line in lines)


def amount(value: float) -> str:
    """Three digits and a unit people read: 812, 41.2k, 3.07M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
