"""Where a rank's output goes: ranks but 0 write straight into their log; rank 0 is also shown on the terminal."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sys
import termios
import threading
from pathlib import Path
from typing import BinaryIO

from launcher.announce import say

_PIECE_BYTES = 65_536
_LONGEST_LINE_BYTES = 65_536
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_DRAIN_S = 2.0


class LogLines:
    """Terminal output as lines of a log: of a progress bar only its last state is kept, colours are dropped."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: BinaryIO | None = file
        self._line = b""

    def feed(self, piece: bytes) -> None:
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            self._write(line)
        # What a carriage return has overwritten is gone on a terminal; the return itself may be half of "\r\n".
        cut = self._line.rstrip(b"\r").rfind(b"\r")
        self._line = self._line[cut + 1 :]
        if len(self._line) > _LONGEST_LINE_BYTES:  # the rest of the line follows it into the file
            self._put(self._line)
            self._line = b""

    def close(self) -> None:
        if self._line.strip():
            self._write(self._line)
        self._line = b""

    def _write(self, line: bytes) -> None:
        self._put(line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n")

    def _put(self, text: bytes) -> None:
        """A log that can no longer be written (a full disk) ends here, not the run: its rank would block for ever."""
        if self._file is None:
            return
        try:
            self._file.write(_ESCAPES.sub(b"", text))
        except OSError as error:
            self._file = None
            if sys.__stderr__ is not None:  # the real one: sys.stderr may feed this log
                say(f"a log ends here, the run goes on: {error.strerror}", sys.__stderr__)


class Echo:
    """Copies one rank's output to this process's standard output and to its log, in a thread of its own.

    On a terminal the rank writes to a pseudo-terminal of the same width, so that progress bars work as if there
    were no launcher in between; otherwise to a pipe. A reader that stalls or goes away (``| head``) never stops the
    supervision, and the log stays complete.
    """

    def __init__(self, log_path: Path, out_fd: int = 1) -> None:
        self._out_fd = out_fd
        self.is_terminal = os.isatty(self._out_fd)
        self._read_fd, self.child_fd = _pseudo_terminal(self._out_fd) if self.is_terminal else os.pipe()
        self._log = log_path.open("ab", buffering=0)
        self._thread = threading.Thread(target=self._copy, name="rank-0-output", daemon=True)

    def started(self) -> None:
        """The rank holds its end; this process lets go of its own and begins to copy."""
        os.close(self.child_fd)
        self._thread.start()

    def match_size(self) -> None:
        """The terminal has a new size; the rank's pseudo-terminal gets it too."""
        if self.is_terminal:
            try:
                _copy_size(self._out_fd, self._read_fd)
            except OSError:
                pass  # the rank is gone

    def finish(self) -> None:
        """Waits for the last output; a process that the rank left behind may hold its end open, so not for ever."""
        self._thread.join(_DRAIN_S)

    def _copy(self) -> None:
        lines = LogLines(self._log)
        while piece := self._read():
            lines.feed(piece)
            self._show(piece)
        lines.close()
        self._log.close()
        os.close(self._read_fd)

    def _read(self) -> bytes:
        try:
            return os.read(self._read_fd, _PIECE_BYTES)
        except OSError as error:
            if error.errno == errno.EIO:  # Linux's word for: nobody holds the other end of the pseudo-terminal
                return b""
            raise

    def _show(self, piece: bytes) -> None:
        while piece and self._out_fd >= 0:
            try:
                piece = piece[os.write(self._out_fd, piece) :]
            except OSError:  # nobody reads any more; the log goes on
                self._out_fd = -1


def _pseudo_terminal(out_fd: int) -> tuple[int, int]:
    """(our end, the rank's end), of the size of the terminal ``out_fd``, that passes bytes on as they are."""
    ours, theirs = os.openpty()
    _copy_size(out_fd, ours)
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST  # the real terminal turns "\n" into "\r\n"; once is enough
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    return ours, theirs


def _copy_size(source_fd: int, target_fd: int) -> None:
    size = fcntl.ioctl(source_fd, termios.TIOCGWINSZ, b"\0" * 8)
    fcntl.ioctl(target_fd, termios.TIOCSWINSZ, size)
