"""Standard input, output and error as they may be found: closed, without a reader, in an encoding of few letters."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def make_streams_safe() -> None:
    """For a program's first line, before it opens anything.

    A closed descriptor 0, 1 or 2 would be given to the next file that is opened, and output meant for people would go
    into that file: it leads nowhere instead. A letter that the encoding lacks is written as an escape.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest free one, which is this one
            if nowhere != fd:
                os.dup2(nowhere, fd)
                os.close(nowhere)
            os.set_inheritable(fd, True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def visible(text: str) -> str:
    """``text`` for a terminal: letters that would steer it (ESC, a bell, text that runs backwards) as their escapes.

    Line breaks and tabs stay. Whatever is said to people goes through here, as it may quote what somebody else wrote.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def lead_nowhere(stream: TextIO | None) -> None:
    """What the stream could not get rid of would end the program with a complaint."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
