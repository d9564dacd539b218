"""Where the ranks of a job step meet: a store on the step's first node, found without asking anybody.

All tasks compute the same short list of ports. Rank 0 serves on the first that is free there; the others try the list
until a store answers with this step's token, so that a stranger on one of the ports misleads nobody.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import torch.distributed as dist

from launcher.slurm.step import Step

_TOKEN_KEY = "launcher/step"
_ANSWER_S = 5.0  # for a stranger that takes the connection and says nothing
_PAUSE_S = 0.2


def store_of(step: Step, timeout_s: float) -> dist.TCPStore:
    """Rank 0 serves, the others find it.

    Raises:
        RuntimeError: no port is free, or rank 0 was not found in ``timeout_s``.
    """
    return _serve(step, timeout_s) if step.rank == 0 else _find(step, timeout_s)


def _serve(step: Step, timeout_s: float) -> dist.TCPStore:
    listener = _listener(step.ports)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    store.set(_TOKEN_KEY, step.token)
    return store


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
            store = _connect(step, port)
            if store is not None:
                store.set_timeout(timedelta(seconds=timeout_s))
                return store
        time.sleep(_PAUSE_S)
    where = f"{step.master_host}, ports {_listed(step.ports)}"
    raise RuntimeError(
        f"rank 0 was not found in {timeout_s:g} s at {where}: it did not start, or a firewall is between"
    )


def _connect(step: Step, port: int) -> dist.TCPStore | None:
    """The step's store if it is there. (A store by itself would go on asking a port at which nobody listens.)"""
    answer = timedelta(seconds=_ANSWER_S)
    try:
        with socket.create_connection((step.master_host, port), timeout=_ANSWER_S):
            store = dist.TCPStore(step.master_host, port, is_master=False, timeout=answer, wait_for_workers=False)
            if store.check([_TOKEN_KEY]) and store.get(_TOKEN_KEY).decode() == step.token:
                return store
    except (OSError, RuntimeError):  # nobody there yet, or somebody else
        pass
    return None


def _listed(ports: list[int]) -> str:
    return ", ".join(map(str, ports))
