"""The word a rank leaves for its launcher: JSON records on a pipe: ``done`` or a failure, perhaps ``saving`` before.

A pipe and not a file: nothing to clean up, and the record is complete when the process is gone. A rank that ends
without a record was killed or left early, whatever its exit code says.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from launcher.failure import Failure

STATUS_FD_VARIABLE = "FSDP_LAUNCHER_STATUS_FD"
# A pipe holds 64 KiB unread, and a longer record would block the failing rank; JSON writes a character in at most six
# bytes. Tracebacks keep their end.
_TRACEBACK_CHARACTERS = 8_000
_WHAT_CHARACTERS = 1_000
_READ_BYTES = 65_536


@dataclass(frozen=True)
class Status:
    """What a rank said: that it reached the end, or how it failed; until then, that it saves because it was asked to
    stop, which may take longer than the grace period."""

    is_done: bool
    failure: Failure | None = None
    is_saving: bool = False

    @property
    def is_final(self) -> bool:
        return self.is_done or self.failure is not None


class StatusWriter:
    """The rank's end. Without a launcher (torchrun) there is no pipe and nothing is written."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    @classmethod
    def from_environment(cls) -> StatusWriter:
        """Takes the descriptor out of the environment, so that processes this rank starts know nothing of it."""
        text = os.environ.pop(STATUS_FD_VARIABLE, None)
        if text is None:
            return cls(None)
        fd = int(text)
        os.set_inheritable(fd, False)
        return cls(fd)

    @property
    def is_connected(self) -> bool:
        return self._fd is not None

    def done(self) -> None:
        self._write({"is_done": True})

    def saving(self) -> None:
        self._write({"is_done": False, "is_saving": True})

    def failed(self, failure: Failure) -> None:
        fields = asdict(failure)
        fields["what"] = failure.what[:_WHAT_CHARACTERS]
        fields["traceback"] = failure.traceback[-_TRACEBACK_CHARACTERS:]
        self._write({"is_done": False, "failure": fields})

    def _write(self, record: dict[str, object]) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, json.dumps(record).encode() + b"\n")
        except BrokenPipeError:
            pass  # the launcher is gone; this process is about to go too


class StatusReader:
    """The launcher's end; ``latest`` never waits."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._text = b""
        self._is_open = True

    @property
    def child_fd(self) -> int:
        """The descriptor to hand to the rank."""
        return self._write_fd

    def started(self) -> None:
        """The rank has its copy of the writing end; this process lets go of its own."""
        os.close(self._write_fd)

    def latest(self) -> Status | None:
        """The rank's last word if there is one, else its last whole record; None if it said nothing yet."""
        while self._is_open:
            try:
                piece = os.read(self._read_fd, _READ_BYTES)
            except BlockingIOError:
                break
            if not piece:
                self.close()
            self._text += piece
        records = self._text.split(b"\n")[:-1]
        if not records:
            return None
        said = [_status(json.loads(record)) for record in records]
        return next((status for status in reversed(said) if status.is_final), said[-1])

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._read_fd)


def _status(record: dict[str, Any]) -> Status:
    if "failure" in record:
        return Status(is_done=False, failure=Failure(**record["failure"]))
    return Status(record["is_done"], is_saving=record.get("is_saving", False))
