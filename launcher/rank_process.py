"""One rank as its launcher sees it: a fresh process in a session of its own, its log, its last word."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from launcher.parent_death import PARENT_PID_VARIABLE
from launcher.rank_output import Echo
from launcher.status_pipe import STATUS_FD_VARIABLE, Status, StatusReader


@dataclass(frozen=True)
class RankCommand:
    """How to start one rank.

    argv, env: of the process; env is complete.
    log_path: gets what the rank writes to standard output and error, in their order.
    inherit: descriptors the rank takes over (rank 0: the listening socket of the rendezvous).
    """

    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_path: Path
    inherit: tuple[int, ...] = ()


class RankProcess:
    """A started rank. It leads a process group of its own: what it starts is ended with it."""

    def __init__(self, command: RankCommand, echo: Echo | None = None) -> None:
        """Raises OSError if the process cannot be started; nothing is left behind then."""
        self.rank = command.rank
        self.log_path = command.log_path
        self._reader = StatusReader()
        self._last_status: Status | None = None
        status_fd = self._reader.child_fd
        log: BinaryIO | None = None
        try:
            if echo is None:
                log = command.log_path.open("ab")
            self._process = subprocess.Popen(
                command.argv,
                env={
                    **command.env,
                    STATUS_FD_VARIABLE: str(status_fd),
                    PARENT_PID_VARIABLE: str(os.getpid()),
                },
                stdin=subprocess.DEVNULL,
                stdout=log if echo is None else echo.child_fd,
                stderr=subprocess.STDOUT,
                pass_fds=(status_fd, *command.inherit),
                start_new_session=True,  # Ctrl-C of the terminal reaches the launcher alone
            )
        except OSError:
            self._reader.close()
            raise
        finally:
            self._reader.started()
            if log is not None:
                log.close()
            if echo is not None:
                echo.started()

    @property
    def pid(self) -> int:
        return self._process.pid

    def returncode(self) -> int | None:
        """As subprocess has it: None while it runs, -n if signal n ended it."""
        return self._process.poll()

    def status(self) -> Status | None:
        """What the rank said last; still to be had when it is gone."""
        self._last_status = self._reader.latest() or self._last_status
        return self._last_status

    def send(self, signum: int) -> None:
        """To the rank alone, not to what it started: the rank decides how those end."""
        if self._process.poll() is None:
            self._process.send_signal(signum)

    def kill(self) -> None:
        """SIGKILL to the rank and everything in its process group, and its exit collected."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # nobody is left; macOS says PermissionError for a group of zombies
        self._process.wait()

    def close(self) -> None:
        self.status()
        self._reader.close()
