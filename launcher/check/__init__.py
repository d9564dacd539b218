"""The checker: a composed tree becomes a typed ``Config``, or every problem is told at once. No torch, no Hydra."""

from launcher.check.about import About
from launcher.check.config import check_tree, read_config

__all__ = ["About", "check_tree", "read_config"]
