"""``CheckpointError``: what is wrong with a checkpoint or with saving one, told in the user's words. No torch here."""

from __future__ import annotations


class CheckpointError(ValueError):
    """The message names the folder or file, what was expected, what was found, and a remedy."""


class DamagedCheckpoint(CheckpointError):
    """The checkpoint itself is incomplete or not what was written; an earlier one may be whole."""


class Unsaved(CheckpointError):
    """A run under way could not save; what it saved before is untouched."""


class Superseded(CheckpointError):
    """A newer attempt of this run has taken the folder over; this one must not save any more."""
