"""The config schema: plain dataclasses, units in the names, no torch.

What a field means is said once, in its ``help``; the checker, ``--help`` and the docs read it from here.
Values arrive as YAML and are checked against the annotations by the launcher; ``X | None`` allows null.
A dataclass is the schema of one *kind* inside a group (``model.kind: gpt`` -> ``GPTConfig``); which kinds
exist is in ``recipes.registry``.
"""

from recipes.schema.fields import MISSING, described
from recipes.schema.recipe import RecipeConfig

__all__ = ["MISSING", "RecipeConfig", "described"]
