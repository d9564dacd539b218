"""Work in a copy of this process that may fail, hang or end itself without this process noticing more than that.

A fork, not a fresh interpreter: everything is imported and at hand, which a tiny run would wait seconds for otherwise.
The copy has none of the other threads, so it computes with one and touches no device; what it leaves is one JSON text.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch

_LOOK_S = 0.1


class NoAnswer(Exception):
    """The copy has not answered; the message says why."""


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


def in_one_line(error: BaseException) -> str:
    """What went wrong where nobody is helped by more: the error's class and the first line of its text."""
    return f"{type(error).__name__}: {first_line(error)}"


def answer_of(work: Callable[[], Any], seconds: float, why_not: Callable[[], str] = str) -> Any:
    """What ``work`` returns in the copy, as JSON gives it back.

    why_not: asked several times a second; a text ends the copy. Nothing that the copy prints is seen.

    Raises:
        NoAnswer: ``work`` raised or ended the copy, took longer than ``seconds``, or ``why_not`` said so.
    """
    read_fd, write_fd = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks beside threads: see the module's docstring
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        _be_the_copy(work, write_fd, seconds)
    os.close(write_fd)
    try:
        text = _read(read_fd, time.monotonic() + seconds, seconds, why_not)
    finally:
        os.close(read_fd)
        _end(pid)
    if not text:
        raise NoAnswer("the process that made it ended without a word")
    answer = json.loads(text)
    if "error" in answer:
        raise NoAnswer(answer["error"])
    return answer["found"]


def _be_the_copy(work: Callable[[], Any], write_fd: int, seconds: float) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)  # the other process listens at the other end
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(seconds) + 5)  # should nobody be there any more to end it
        gc.disable()  # what belongs to a device must not be freed from here
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        torch.set_num_threads(1)
        try:
            text = json.dumps({"found": work()})
        except Exception as error:
            text = json.dumps({"error": in_one_line(error)})
        with os.fdopen(write_fd, "w", encoding="utf-8") as file:
            file.write(text)
        code = 0
    finally:
        os._exit(code)


def _read(read_fd: int, deadline: float, seconds: float, why_not: Callable[[], str]) -> str:
    """Everything until the other end is closed."""
    chunks: list[bytes] = []
    while True:
        if why := why_not():
            raise NoAnswer(why)
        if time.monotonic() > deadline:
            raise NoAnswer(f"it takes more than {seconds:g} s; action=plan takes its time")
        if select.select([read_fd], [], [], _LOOK_S)[0]:
            chunk = os.read(read_fd, 1 << 16)
            if not chunk:
                return b"".join(chunks).decode("utf-8")
            chunks.append(chunk)


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)  # after a good answer there is nothing left to do for it
    except ProcessLookupError:
        pass
    os.waitpid(pid, 0)
