"""Tasks: how a batch and a model become a loss, and how held-out samples become metrics."""

from recipes.tasks.base import Evaluation, Task
from recipes.tasks.select import task_for

__all__ = ["Evaluation", "Task", "task_for"]
