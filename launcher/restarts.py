"""Whether a run that ended badly is started again, and when. Pure.

Started again: a rank raised, was killed or left early; a hang (a network or a device that recovers is its usual cause).
Not started again: an error that the user must change (data, config, a loss that ran away); out of memory, since the
same step needs the same memory again; whatever was stopped by a signal or by the time limit.
"""

from __future__ import annotations

from launcher.errors import EXIT_OUT_OF_MEMORY
from launcher.failure import Failure

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


def may_help(failure: Failure) -> bool:
    """Whether another attempt could end otherwise."""
    return not failure.is_users and failure.exit_code != EXIT_OUT_OF_MEMORY


def pause_s(num_restarts: int) -> float:
    """Seconds before restart number ``num_restarts`` (from 1): what failed may need a moment, and more each time."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(num_restarts - 1, 30), _LONGEST_PAUSE_S)


def announcement(num_restarts: int, max_restarts: int, attempt: int, seconds: float) -> str:
    """What people read between two attempts, below the failure."""
    return (
        f"starting the ranks again in {seconds:g} s: restart {num_restarts} of {max_restarts} "
        f"(cluster.max_restarts), attempt {attempt} in this folder"
    )
