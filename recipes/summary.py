"""How a run ended: the record the launcher gets, ``summary.json``, and the last lines people see."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from recipes.amounts import memory
from recipes.loggers.jsonl import strict
from recipes.plan.compared import Beside
from recipes.report import amount


@dataclass(frozen=True)
class Summary:
    """One finished run. Rates are medians over its steps; memory is the largest of all ranks and steps.

    status: ``finished``, or ``stopped_early`` when the held-out loss no longer improved.
    train_loss: of the last step. evaluation: the last evaluation's metrics, empty without one.
    unit, units_per_s: what speed counts (``tokens`` or ``samples``) and how many a second over all ranks.
    tflops_per_rank, mfu, hfu: None where the model gives no FLOP count or the hardware's peak is unknown.
    sent_bytes: what rank 0 sent to other ranks for the model since this start, evaluations included.
    num_skipped: updates left out because of their loss; num_overflowed: because a scaled gradient overflowed.
    num_unreadable: samples left out that could not be read.
    plan: what a plan of the same config says, beside what was measured; empty where none was asked for.
    train_s: seconds spent in steps; wall_s: from start to end, preparing and evaluating included.
    """

    status: str
    steps: int
    samples: int
    world_size: int
    sharding_factor: int
    num_parameters: int
    train_loss: float
    evaluation: dict[str, float]
    best_eval_loss: float | None
    unit: str
    units_per_s: float
    step_s: float
    tflops_per_rank: float | None
    mfu: float | None
    hfu: float | None
    train_s: float
    wall_s: float
    run_dir: str
    peak_memory: dict[str, int] = field(default_factory=dict)
    sent_bytes: int = 0
    num_skipped: int = 0
    num_unreadable: int = 0
    num_overflowed: int = 0
    plan: Beside = field(default_factory=Beside)

    def as_json(self) -> dict[str, object]:
        """Plain data; numbers that are not finite are null."""
        plain = dataclasses.asdict(self)
        plain["plan"] = self.plan.as_json()
        plain["evaluation"] = {name: strict(value) for name, value in self.evaluation.items()}
        return {name: strict(value) if isinstance(value, float) else value for name, value in plain.items()}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")

    def text(self) -> str:
        """A few lines for people."""
        how = "stopped early" if self.status == "stopped_early" else "done"
        rows = [
            ("", f"{how}: {self.steps} steps, {amount(self.samples)} samples in {self.wall_s:.0f} s"),
            ("train loss", f"{self.train_loss:.4f}"),
            *((f"held-out {name.replace('_', ' ')}", f"{value:.4f}") for name, value in self.evaluation.items()),
            *([("updates left out", str(self.num_skipped))] if self.num_skipped else []),
            *([("unreadable samples", str(self.num_unreadable))] if self.num_unreadable else []),
            *([("overflows", f"{self.num_overflowed} updates left out")] if self.num_overflowed else []),
            ("speed", self._speed()),
            *(
                (name.removesuffix("_bytes").replace("_", " "), memory(value))
                for name, value in self.peak_memory.items()
            ),
            *self.plan.lines(),
            ("run folder", self.run_dir),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}".strip() for name, value in rows)

    def _speed(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        parts = [
            f"{amount(self.units_per_s)} {self.unit}/s on {ranks}",
            f"{self.step_s * 1e3:.0f} ms/step",
        ]
        if self.tflops_per_rank is not None:
            parts.append(f"{self.tflops_per_rank:.3g} TFLOPS/rank")
        if self.mfu is not None:
            parts.append(f"MFU {100 * self.mfu:.1f}%")
        return ", ".join(parts)
