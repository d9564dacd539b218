"""What must not be written down or sent away: told apart by the name of a key or variable, and by the look of a value.

Used by whoever writes the run folder and by loggers. No list is complete: a secret under an innocent name that looks
like an ordinary word cannot be recognised.
"""

from __future__ import annotations

import re

HIDDEN = "<hidden>"

_NAME = re.compile(
    r"(api_?key|access_?key|private_?key|token|secret|passw(or)?d|passphrase|credential|auth)s?$", re.IGNORECASE
)
# Keys of services, by the shape that they are handed out in.
_VALUES = re.compile(
    r"""(?x)
    \b(?:
        hf_[A-Za-z0-9]{20,}                              # Hugging Face
      | sk-[A-Za-z0-9_-]{20,}                            # several AI services
      | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,}  # GitHub
      | glpat-[A-Za-z0-9_-]{16,}                         # GitLab
      | (?:AKIA|ASIA)[0-9A-Z]{16}                        # AWS
      | AIza[A-Za-z0-9_-]{30,}                           # Google
      | xox[abprs]-[A-Za-z0-9-]{10,}                     # Slack
      | wandb_v1_\w{20,}                                 # Weights & Biases
      | eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}  # a signed web token
    )
    | -----BEGIN[ A-Z]*PRIVATE[ ]KEY-----(?:.|\n)*?(?:-----END[ A-Z]*PRIVATE[ ]KEY-----|\Z)
    """
)
_IN_ADDRESS = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/:@]*:)[^\s/@]+@", re.IGNORECASE)  # scheme://user:password@host


def is_secret_name(name: object) -> bool:
    """Whether values of this key, variable or dotted path are secret: ``WANDB_API_KEY``, ``db.password``."""
    return _NAME.search(str(name)) is not None


def without_secret_values(text: str) -> str:
    """The text with everything hidden that looks like a key, a signed token, a private key or a password in a URL."""
    return _IN_ADDRESS.sub(rf"\1{HIDDEN}@", _VALUES.sub(HIDDEN, text))


def is_secret(name: object, value: object) -> bool:
    """Whether a variable must be hidden: by its name, or because its value looks like a key."""
    text = str(value)
    return is_secret_name(name) or without_secret_values(text) != text
