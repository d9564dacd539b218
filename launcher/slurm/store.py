"""Where the ranks of a job step meet: a store on the step's first node, found without asking anybody.

All tasks compute the same short list of ports. Rank 0 takes the first that is free there and tells whoever connects the
step's token and its store's port. The others try the list until they hear their own token, so that a stranger on one of
the ports, one that says nothing included, misleads nobody.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from launcher.slurm.step import Step

_ANSWER_S = 5.0
_PAUSE_S = 0.2
_LONGEST_ANSWER = 200  # bytes


def store_of(step: Step, timeout_s: float) -> dist.TCPStore:
    """Rank 0 serves, the others find it.

    Raises:
        RuntimeError: no port is free, or rank 0 was not found in ``timeout_s``.
    """
    return _serve(step, timeout_s) if step.rank == 0 else _find(step, timeout_s)


def _serve(step: Step, timeout_s: float) -> dist.TCPStore:
    listener = _listener(step.ports)
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
    answer = f"{step.token} {store.port}\n".encode()
    threading.Thread(target=_answer, args=(listener, answer), name="step-port", daemon=True).start()
    return store


def _answer(listener: socket.socket, answer: bytes) -> None:
    """For as long as the process lives."""
    while True:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)
        except OSError:  # who asked is gone already
            continue


def _listener(ports: list[int]) -> socket.socket:
    for port in ports:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind(("", port))
            listener.listen(socket.SOMAXCONN)
        except OSError:
            listener.close()
            continue
        return listener
    raise RuntimeError(f"rank 0 finds none of the ports {_listed(ports)} free on {socket.gethostname()}")


def _find(step: Step, timeout_s: float) -> dist.TCPStore:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        for port in step.ports:
            store_port = _ask(step, port)
            if store_port is not None:
                timeout = timedelta(seconds=timeout_s)
                return dist.TCPStore(step.master_host, store_port, timeout=timeout, wait_for_workers=False)
        time.sleep(_PAUSE_S)
    where = f"{timeout_s:g} s at {step.master_host}, ports {_listed(step.ports)}"
    raise RuntimeError(f"rank 0 was not found in {where}: it did not start, or a firewall is between")


def _ask(step: Step, port: int) -> int | None:
    """The port of the step's store, if it is rank 0 that answers here."""
    try:
        with socket.create_connection((step.master_host, port), timeout=_ANSWER_S) as connection:
            token, _, store_port = connection.makefile().readline(_LONGEST_ANSWER).partition(" ")
    except (OSError, UnicodeDecodeError):  # nobody there yet, or somebody else
        return None
    return int(store_port) if token == step.token else None


def _listed(ports: list[int]) -> str:
    return ", ".join(map(str, ports))
