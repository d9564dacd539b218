"""Where the ranks of a step meet: rank 0 takes the first free port, strangers on the others mislead nobody."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from launcher.slurm import store
from launcher.slurm.step import Step


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Step:
    monkeypatch.setattr(store, "_ANSWER_S", 1.0)
    with socket.socket() as probe:  # a number that another test session does not use now
        probe.bind(("", 0))
        unique = str(probe.getsockname()[1])
    return Step(0, 2, 0, 2, "127.0.0.1", unique, "0", 0, unique)


def meet(step: Step) -> list[dist.TCPStore]:
    """The stores of rank 0 and rank 1."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda rank: store.store_of(replace(step, rank=rank), 60), range(step.world_size)))


def test_two_ranks_meet(step: Step) -> None:
    first, second = meet(step)
    first.set("from", "rank 0")
    assert second.get("from") == b"rank 0"
    assert ports_taken(step)[:2] == [True, False]


def ports_taken(step: Step) -> list[bool]:
    def is_taken(port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    return [is_taken(port) for port in step.ports]


def test_strangers_on_the_first_ports(step: Step) -> None:
    """One that takes connections and says nothing, one that says what nobody asked for, rank 0 of another step."""
    mute = socket.create_server(("", step.ports[0]))
    rude = socket.create_server(("", step.ports[1]))
    threading.Thread(target=store._answer, args=(rude, b"\xff\xfe no text\n"), daemon=True).start()
    other = socket.create_server(("", step.ports[2]))
    threading.Thread(target=store._answer, args=(other, b"1.0.0 4321\n"), daemon=True).start()
    first, second = meet(step)
    first.set("from", "rank 0")
    assert second.get("from") == b"rank 0"
    assert ports_taken(step)[:5] == [True, True, True, True, False]
    mute.close()


def test_no_port_is_free(step: Step) -> None:
    taken = [socket.create_server(("", port)) for port in step.ports]
    with pytest.raises(RuntimeError, match=f"none of the ports {step.ports[0]}, "):
        store.store_of(step, 1)
    for server in taken:
        server.close()


def test_rank_0_never_comes(step: Step) -> None:
    with pytest.raises(RuntimeError, match="rank 0 was not found in 0.5 s at 127.0.0.1"):
        store.store_of(replace(step, rank=1), 0.5)
