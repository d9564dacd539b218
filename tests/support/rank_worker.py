"""The process of one warm rank: joins the group, then runs what its pool sends until the pool goes away."""

from __future__ import annotations

import ctypes
import gc
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from tests.support.ranks import Outcome, Rank

_PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives its test session
    fd, number, world_size, port = map(int, sys.argv[1:])
    connection = Connection(fd)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", rank=number, world_size=world_size, store=dist.PrefixStore("pool", store), timeout=timedelta(minutes=2)
    )
    rank = Rank(number, world_size, store)
    connection.send_bytes(pickle.dumps(Outcome()))
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        connection.send_bytes(_answer(rank, message))


def _answer(rank: Rank, message: bytes) -> bytes:
    try:
        function, args = pickle.loads(message)
        torch.manual_seed(0)
        outcome = Outcome(value=function(rank, *args))
        return pickle.dumps(outcome)
    except BaseException as error:
        text = traceback.format_exc()
        try:
            answer = pickle.dumps(Outcome(error=error, traceback=text))
            pickle.loads(answer)
        except Exception:  # the exception cannot travel: its text can
            answer = pickle.dumps(Outcome(error=RuntimeError(text), traceback=text))
        return answer
    finally:
        gc.collect()


if __name__ == "__main__":
    main()
