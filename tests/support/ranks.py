"""Warm ranks: processes that have imported torch and joined a gloo group, kept for the whole test session.

    def average(rank: Rank, value: float) -> float: ...      # a module-level function, runs on every rank

    def test_average(ranks):
        assert ranks(2).run(average, 3.0) == [3.0, 3.0]

Functions travel by name, so they must be importable (no lambdas, no closures); arguments and results are pickled.
A pool in which a rank died, hung or raised something it cannot go on from is replaced at the next use.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 180.0  # seconds; a warm start takes 2 to 6


@dataclass(frozen=True)
class Rank:
    """What a function on a rank is told."""

    rank: int
    world_size: int
    store: dist.Store


@dataclass(frozen=True)
class Outcome:
    """One rank's end of one call: a value, an exception with its traceback, or a dead process."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    has_died: bool = False

    @property
    def is_ok(self) -> bool:
        return self.error is None and not self.has_died


class RanksFailed(AssertionError):
    """At least one rank raised, died or gave no answer. ``outcomes`` in rank order."""

    def __init__(self, outcomes: list[Outcome], log: str) -> None:
        self.outcomes = outcomes
        lines = []
        for rank, outcome in enumerate(outcomes):
            if outcome.has_died:
                lines.append(f"rank {rank}: the process is gone or gave no answer")
            elif outcome.error is not None:
                lines.append(f"rank {rank}:\n{outcome.traceback}")
        super().__init__("\n".join([*lines, "output of the ranks:", log[-4000:]]))


class RankPool:
    """``world_size`` processes in one gloo group."""

    def __init__(self, world_size: int, *, threads: int = 1) -> None:
        self.world_size = world_size
        self.is_usable = True
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        for rank in range(world_size):
            here, there = Pipe()
            command = [sys.executable, "-m", "tests.support.rank_worker"]
            command += [str(there.fileno()), str(rank), str(world_size), str(self._store.port)]
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        started = self._collect(START_LIMIT_S)
        if not all(outcome.is_ok for outcome in started):
            log = self.log()
            self.close()
            raise RanksFailed(started, log)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Outcome]:
        """``function(rank, *args)`` on every rank; what became of each."""
        message = pickle.dumps((function, args))
        for connection in self._connections:
            connection.send_bytes(message)
        outcomes = self._collect(timeout_s)
        self.is_usable = not any(outcome.has_died for outcome in outcomes)
        return outcomes

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """``function(rank, *args)`` on every rank; their values in rank order. Raises ``RanksFailed``."""
        outcomes = self.outcomes(function, *args, timeout_s=timeout_s)
        if not all(outcome.is_ok for outcome in outcomes):
            self.is_usable = False  # ranks may have stopped in different places
            raise RanksFailed(outcomes, self.log())
        return [outcome.value for outcome in outcomes]

    def _collect(self, timeout_s: float) -> list[Outcome]:
        """One message of every rank; ranks that die or stay silent count as died."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        waiting: dict[Any, int] = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    outcomes[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    outcomes[rank] = Outcome(has_died=True)
        return [outcomes.get(rank, Outcome(has_died=True)) for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes at once: they hold nothing worth saving."""
        self.is_usable = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._log.close()


class Pools:
    """One pool per world size, started when first asked for. Call it: ``pools(2).run(...)``."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        pool = self._pools.get(world_size)
        if pool is not None and not pool.is_usable:
            pool.close()
            pool = None
        if pool is None:
            pool = self._pools[world_size] = RankPool(world_size)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of a large world whose collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend; slow to import

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore(), timeout=timedelta(seconds=30))
    try:
        yield
    finally:
        dist.destroy_process_group()
