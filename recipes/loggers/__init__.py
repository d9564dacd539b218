"""Where metrics go. Rank 0 only; a logger never changes a run."""

from recipes.loggers.base import Logger
from recipes.loggers.select import open_loggers

__all__ = ["Logger", "open_loggers"]
