"""Checkpoints: everything a run needs to go on, written by all ranks, readable at any number of ranks.

No torch here: ``folder``, ``manifest``, ``retention`` and ``every`` answer without it.
"""
