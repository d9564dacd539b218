"""A worker's loop: build once, then answer commands until the other side goes away."""

from __future__ import annotations

import ctypes
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from engine_bench.answers import Failed

_PR_SET_PDEATHSIG = 1


def serve(fd: int, build: Callable[[], Callable[[tuple[Any, ...]], Any]]) -> None:
    """``build()`` gives the function that answers a command. Dies with the process that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(fd)
    torch.set_num_threads(1)
    try:
        answer = build()
        connection.send_bytes(pickle.dumps(None))
    except BaseException:
        connection.send_bytes(pickle.dumps(Failed(traceback.format_exc())))
        return
    while True:
        try:
            command = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        try:
            reply: Any = answer(command)
        except BaseException:
            reply = Failed(traceback.format_exc())
        connection.send_bytes(pickle.dumps(reply))
