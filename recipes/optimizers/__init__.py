"""Optimizers over the engine's flat shards."""

from recipes.optimizers.groups import build_optimizer

__all__ = ["build_optimizer"]
