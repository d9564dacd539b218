"""What went wrong in one rank, as a record; which of several failures came first; the text for people."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import EXIT_OUT_OF_MEMORY, EXIT_RANK_FAILED, EXIT_USAGE

# How a rank says that another one went away: gloo's, NCCL's and the store's texts.
_LOST_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "failed to recv, got 0 bytes",
    "remote process exited or there was a network error",
    "NCCL communicator was aborted",
    "in vain: its process has died",  # the shared-memory wire's
)
_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "not enough memory", "CUDA error: out of memory")
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EROFS)  # of a file that is named
_LAST_LOG_LINES = 15
_LONGEST_END, _LONGEST_LINE = 65_536, 2_000  # bytes read of a log, characters shown of a line
# What the user must change, told apart by name, and the run's exit code then.
_USERS = {
    "DataError": EXIT_RANK_FAILED,
    "ConfigErrors": EXIT_RANK_FAILED,
    "LossError": EXIT_RANK_FAILED,
    "FolderError": EXIT_USAGE,
    "CheckpointError": EXIT_USAGE,
    "DamagedCheckpoint": EXIT_USAGE,
    "Unsaved": EXIT_RANK_FAILED,
    "Superseded": EXIT_RANK_FAILED,
}
_CAUSE_ORDER = ("vanished", "raised", "lost_peer")


@dataclass(frozen=True)
class Failure:
    """Why one rank did not reach the end.

    rank: which one.
    what: one line: ``RuntimeError: ...``, ``was killed by SIGKILL``, ``left before the run ended``.
    exit_code: the run's exit code if this failure is the one that counts.
    time_s: when, in seconds since the epoch, by this host's clock.
    kind: ``vanished`` (killed, or gone without a word), ``raised``, ``lost_peer`` (it only noticed that another
        rank was gone), or ``hang`` (nobody failed, nobody went on).
    traceback: of the exception, empty where there was none; of a hang, which rank is where.
    hint: what to try.
    is_users: something the user must change, told in their words: where it was found in the code helps nobody.
    """

    rank: int
    what: str
    exit_code: int
    time_s: float
    kind: str = "raised"
    traceback: str = ""
    hint: str = ""
    is_users: bool = False

    @property
    def is_lost_peer(self) -> bool:
        return self.kind == "lost_peer"

    @property
    def shown_traceback(self) -> str:
        """For a terminal: empty for what the user must change."""
        return "" if self.is_users else self.traceback


def from_exception(rank: int, error: BaseException, traceback: str) -> Failure:
    """The record of an exception; judged by names and texts, so that it needs no torch."""
    chain = list(_causes(error))
    text = " ".join(str(error).split()) or "no message"
    what = f"{type(error).__name__}: {text}"
    if type(error).__name__ in _USERS:
        return Failure(rank, str(error), _USERS[type(error).__name__], time.time(), traceback=traceback, is_users=True)
    if isinstance(error, OSError) and error.errno in _DISK_IS_FULL:
        told = f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
        told += ". Make room and start the same command again: it goes on from its newest checkpoint"
        return Failure(rank, told, EXIT_RANK_FAILED, time.time(), traceback=traceback, is_users=True)
    if isinstance(error, OSError) and error.errno in _IN_THE_WAY and error.filename:
        told = f"{error.strerror}: {error.filename}. Move it away or change who may use it, and start again"
        return Failure(rank, told, EXIT_RANK_FAILED, time.time(), traceback=traceback, is_users=True)
    if isinstance(error, SystemExit):
        what = f"called sys.exit({error.code!r}) before the run ended"
    if any(_is_out_of_memory(link) for link in chain):
        hint = "try a smaller train.micro_batch, train.activation_checkpointing=true or a larger sharding.factor"
        return Failure(rank, what, EXIT_OUT_OF_MEMORY, time.time(), traceback=traceback, hint=hint)
    is_lost_peer = any(fragment in str(link) for link in chain for fragment in _LOST_PEER_TEXTS)
    kind = "lost_peer" if is_lost_peer else "raised"
    return Failure(rank, what, EXIT_RANK_FAILED, time.time(), kind, traceback)


def from_exit(rank: int, returncode: int, is_out_of_memory_kill: bool) -> Failure:
    """The record of a rank that ended without a word: killed by a signal, or gone by ``os._exit``.

    returncode: as subprocess gives it, ``-n`` for signal n.
    is_out_of_memory_kill: the kernel's out-of-memory killer was at work during the run.
    """
    if returncode >= 0:
        what = f"left before the run ended (exit code {returncode})"
        return Failure(rank, what, EXIT_RANK_FAILED, time.time(), "vanished")
    name = signal_name(-returncode)
    if returncode == -signal.SIGKILL and is_out_of_memory_kill:
        hint = "the host ran out of memory: fewer ranks, a smaller train.micro_batch or a smaller model"
        what = f"was killed by {name}, by the kernel for want of memory"
        return Failure(rank, what, EXIT_OUT_OF_MEMORY, time.time(), "vanished", hint=hint)
    hint = "somebody sent it, or the kernel ran out of memory (see dmesg)" if returncode == -signal.SIGKILL else ""
    # abort() is how C++ code ends a process, NCCL's watchdog for one after another rank's failure: as if it had raised
    kind = "raised" if returncode == -signal.SIGABRT else "vanished"
    return Failure(rank, f"was killed by {name}", EXIT_RANK_FAILED, time.time(), kind, hint=hint)


def signal_name(signum: int) -> str:
    """``SIGKILL``; real-time signals have no names of their own in Python."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def first(failures: Sequence[Failure]) -> Failure:
    """The failure that explains the others: a rank that vanished, else the earliest that raised, else a lost peer."""
    return min(failures, key=lambda failure: (_CAUSE_ORDER.index(failure.kind), failure.time_s, failure.rank))


def describe(failure: Failure, world_size: int, log_path: Path) -> str:
    """What a person reads: the rank, what happened, the traceback or the last lines of its log, and where to look."""
    if failure.kind == "hang":
        stacks = f"the Python stacks of the ranks are in their logs: {log_path.parent}"
        return f"{failure.what}\n{failure.traceback}\n\n{stacks}\nevery rank was ended."
    verb = "failed: " if failure.traceback else ""
    lines = [f"rank {failure.rank} of {world_size} {verb}{failure.what}"]
    if failure.is_users:
        return f"{failure.what}\n\nfound by {lines[0].partition(' failed')[0]}; traceback in its log: {log_path}"
    detail = failure.traceback or last_lines(log_path)
    if detail:
        lines.append("" if failure.traceback else "the last lines of its log:")
        lines += [f"    {line}".rstrip() for line in detail.rstrip().splitlines()]
        lines.append("")
    if failure.hint:
        lines.append(failure.hint)
    lines.append(f"log: {log_path}")
    if world_size > 1:
        others = "the other rank was" if world_size == 2 else f"the other {world_size - 1} ranks were"
        lines.append(f"{others} ended.")
    return "\n".join(lines)


def told_by_its_rank(failure: Failure) -> str:
    """What a rank itself says where no launcher of ours speaks for it."""
    lines = [f"rank {failure.rank}: {failure.what}"]
    if failure.traceback and not failure.is_users:
        lines.append(failure.traceback)
    if failure.hint:
        lines.append(failure.hint)
    return "\n".join(lines)


def last_lines(log_path: Path, count: int = _LAST_LOG_LINES) -> str:
    """The end of a log; empty if there is none."""
    try:
        with log_path.open("rb") as file:  # of a log of gigabytes, a progress bar's one long line, the end is enough
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_END))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(line[-_LONGEST_LINE:] for line in text.splitlines()[-count:])


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and what it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
