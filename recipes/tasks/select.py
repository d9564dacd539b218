"""Task by name."""

from __future__ import annotations

from recipes.data.records import DataInfo
from recipes.tasks.base import Task
from recipes.tasks.clicks import Clicks
from recipes.tasks.images import Images
from recipes.tasks.language import CausalLM, Seq2SeqLM

_TASKS: dict[str, type[Task]] = {
    "causal_lm": CausalLM,
    "seq2seq_lm": Seq2SeqLM,
    "clicks": Clicks,
    "images": Images,
}


def task_for(name: str, info: DataInfo) -> Task:
    """The model's task; raises ValueError if the data makes samples of another."""
    if name not in _TASKS:
        raise ValueError(f"task '{name}' does not exist; choose one of {', '.join(_TASKS)}")
    if info.task != name:
        raise ValueError(
            f"the model needs samples of task '{name}', the data source makes '{info.task}'; "
            "choose another data or model"
        )
    return _TASKS[name](info)
