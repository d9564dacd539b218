"""``answer``: what the launcher's ``action=plan`` asks for: the text, and plan.json and plan.html in a folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from recipes.plan.machine import machine_of
from recipes.plan.page import page_of
from recipes.plan.predict import Prediction, predict
from recipes.plan.recordings import Recordings
from recipes.plan.result import Plan
from recipes.plan.table import text_of
from recipes.schema import RecipeConfig
from recipes.sizes import UnknownSize

USERS_ERRORS = (UnknownSize,)
recordings = Recordings()


@dataclasses.dataclass(frozen=True)
class Answer:
    """text: for people. plan: the records. prediction: what pictures are drawn from."""

    text: str
    plan: Plan
    prediction: Prediction


def answer(config: RecipeConfig, world_size: int, ranks_per_host: int) -> Answer:
    """Raises UnknownSize: only the data can tell a size that the model needs."""
    machine = machine_of(config.hardware, ranks_per_host, world_size)
    prediction = predict(config, recordings.of(config, world_size, ranks_per_host), machine)
    return Answer(text_of(prediction.plan), prediction.plan, prediction)


def write(found: Answer, folder: Path, title: str) -> None:
    """plan.json and plan.html; the folder exists."""
    (folder / "plan.json").write_text(json.dumps(as_json(found.plan), indent=2) + "\n", encoding="utf-8")
    (folder / "plan.html").write_text(page_of(found.prediction, title), encoding="utf-8")


def as_json(plan: Plan) -> dict[str, Any]:
    """Plain data. With retries or out of memory there are no rates, and no times that could be read as such."""
    plain = dataclasses.asdict(plan)
    plain["fits"], plain["has_retries"] = plan.fits, plan.has_retries
    plain["memory"]["margin"] = plan.memory.margin
    plain["memory"]["margin_units"] = plan.memory.margin_units
    if plan.rates is None:
        plain["time"] = None
    return plain
