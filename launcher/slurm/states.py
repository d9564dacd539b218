"""What became of a job, in the words of our ledgers, from what SLURM says and what the job recorded itself."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.slurm.client import Queued
from launcher.slurm.records import Ended, Story

PENDING, RUNNING, DONE, FAILED = "pending", "running", "done", "failed"
PREEMPTED, OOM, TIMEOUT, LOST, CANCELLED = "preempted", "oom", "timeout", "lost", "cancelled"
OVER = (DONE, FAILED, PREEMPTED, OOM, TIMEOUT, LOST, CANCELLED)

_OF_SLURM = {
    "PENDING": PENDING,
    "CONFIGURING": PENDING,
    "REQUEUED": PENDING,
    "REQUEUE_FED": PENDING,
    "REQUEUE_HOLD": PENDING,
    "RESV_DEL_HOLD": PENDING,
    "SPECIAL_EXIT": PENDING,
    "RUNNING": RUNNING,
    "SUSPENDED": RUNNING,
    "STOPPED": RUNNING,
    "SIGNALING": RUNNING,
    "STAGE_OUT": RUNNING,
    "COMPLETING": RUNNING,
    "COMPLETED": DONE,
    "FAILED": FAILED,
    "BOOT_FAIL": FAILED,
    "LAUNCH_FAILED": FAILED,
    "RECONFIG_FAIL": FAILED,
    "CANCELLED": CANCELLED,
    "REVOKED": CANCELLED,
    "TIMEOUT": TIMEOUT,
    "DEADLINE": TIMEOUT,
    "NODE_FAIL": LOST,
    "OUT_OF_MEMORY": OOM,
    "PREEMPTED": PREEMPTED,
}
# Reasons of a waiting job that time alone does not clear, and what to do.
_STUCK = {
    "PartitionTimeLimit": "the time limit is above the partition's: a smaller cluster.time_limit",
    "PartitionNodeLimit": "more nodes than the partition allows: a smaller cluster.num_nodes",
    "PartitionDown": "the partition is down: ask the site, or another cluster.partition",
    "PartitionInactive": "the partition is inactive: another cluster.partition",
    "BadConstraints": "no nodes are like this: look at cluster.constraint, gpus_per_node, memory, cpus_per_task",
    "InvalidAccount": "the account is unknown: cluster.account",
    "InvalidQOS": "the quality of service is unknown: cluster.qos",
    "AccountNotAllowed": "the account may not use this partition: cluster.account or cluster.partition",
    "QOSNotAllowed": "the quality of service is not allowed here: cluster.qos",
    "DependencyNeverSatisfied": "what it waits for will not happen: cancel it",
    "JobHeldUser": "it is held: scontrol release",
    "JobHeldAdmin": "an administrator holds it",
    "ReqNodeNotAvail": "nodes it needs are down or reserved: look at sinfo, cluster.nodelist",
    "ReservationDeleted": "its reservation is gone: cluster.reservation",
    "launch_failed_requeued_held": "it could not be launched and is held: scontrol release, once the node is well",
}


@dataclass(frozen=True)
class JobState:
    """state: one of the words above. note: for people: why it waits, why it failed."""

    state: str
    note: str = ""
    ended: Ended | None = None

    @property
    def is_over(self) -> bool:
        return self.state in OVER


def job_state(queued: Queued | None, story: Story) -> JobState:
    """queued: None where SLURM does not know the job (any more)."""
    ended = story.ended
    if queued is None or story.original is not None:
        if ended is not None and not ended.requeued:
            return JobState(ended.state, ended.why, ended)
        if story.original is not None:
            return JobState(LOST, f"a copy: job {story.job} belongs to its original, {story.original}", ended)
        return JobState(LOST, "SLURM does not know it any more, and it recorded no end", ended)
    state = _OF_SLURM.get(queued.state, RUNNING)
    if state == PENDING:
        return JobState(PENDING, waiting(queued.reason, ended), ended)
    if state == RUNNING:
        return JobState(RUNNING, f"on {queued.nodes}" if queued.nodes else "", ended)
    if state in (DONE, FAILED) and ended is not None and not ended.requeued:
        return JobState(ended.state, ended.why, ended)  # the job knows more than an exit code tells
    return JobState(state, _END_WORDS.get(state, f"SLURM says {queued.state}"), ended)


_END_WORDS = {
    CANCELLED: "it was cancelled",
    TIMEOUT: "it ran into its time limit",
    LOST: "a node was lost and it may not run again",
    OOM: "SLURM ended it for want of memory",
    PREEMPTED: "another job took its place",
    DONE: "",
}


def waiting(reason: str, ended: Ended | None = None) -> str:
    """Why a job waits; what to do if waiting alone does not help."""
    plain = reason.partition(",")[0].strip("()")
    words = f"waits: {reason}" if reason else "waits"
    if plain in _STUCK:
        words = f"will not start by itself: {reason}: {_STUCK[plain]}"
    return f"{words}; before: {ended.why}" if ended is not None else words
