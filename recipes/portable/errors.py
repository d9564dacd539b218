"""``FolderError``: a model folder that cannot be used as asked, told in the user's words. No torch here."""

from __future__ import annotations


class FolderError(ValueError):
    """The message names the folder and the config key, what was expected, what was found, and a remedy."""
