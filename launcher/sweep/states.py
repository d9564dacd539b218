"""What can become of a job, and which states each command works on."""

from __future__ import annotations

from launcher.errors import EXIT_OK, EXIT_OUT_OF_MEMORY, EXIT_SAVED

PENDING, RUNNING, DONE, FAILED = "pending", "running", "done", "failed"
PREEMPTED, OOM, TIMEOUT, LOST, CANCELLED = "preempted", "oom", "timeout", "lost", "cancelled"

MEANING = {
    PENDING: "has not been started",
    RUNNING: "is running, or waits in SLURM's queue",
    DONE: "reached its end",
    FAILED: "a rank failed, or the run hung",
    PREEMPTED: "saved on a signal: can be started again where it stopped",
    OOM: "out of memory",
    TIMEOUT: "ran into its time limit",
    LOST: "ended without a word: its launcher or its host is gone",
    CANCELLED: "ended by Ctrl-C or by sweep.do=cancel",
}
ALL = tuple(MEANING)
MISSING = (PENDING, PREEMPTED, LOST, CANCELLED)  # resume: there is no result, and nothing says there can be none
UNWELL = (FAILED, OOM, TIMEOUT)  # retry


def state_of(exit_code: int) -> str:
    """What a run's exit code says about its job."""
    if exit_code == EXIT_OK:
        return DONE
    if exit_code == EXIT_SAVED:
        return PREEMPTED
    if exit_code == EXIT_OUT_OF_MEMORY:
        return OOM
    return CANCELLED if exit_code > 128 else FAILED
