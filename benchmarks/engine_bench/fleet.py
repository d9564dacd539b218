"""The processes of one contestant, kept warm and idle while other contestants run; and looking at them from outside."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch.distributed as dist

from engine_bench.answers import Block, Failed
from engine_bench.cases import Case

HERE = Path(__file__).resolve().parents[1]
START_LIMIT_S = 300.0


class ContestantFailed(RuntimeError):
    """A contestant cannot run here; the report says so and goes on."""


class Processes:
    """``world_size`` workers of one kind."""

    def __init__(self, module: str, name: str, world_size: int, details: dict[str, Any]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        for rank in range(world_size):
            here, there = Pipe()
            command = [sys.executable, "-m", module, str(there.fileno()), str(rank), str(world_size)]
            command += [str(self._store.port), name, json.dumps(details)]
            process = subprocess.Popen(
                [*self._entrance(rank), *command],
                env=self._environment(),
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        try:
            self._answers(START_LIMIT_S)
        except ContestantFailed:
            self.close()
            raise

    def _entrance(self, rank: int) -> list[str]:
        """The words before a rank's command: where it runs, if not here."""
        return []

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "DS_ACCELERATOR": "cpu",
        }

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def ask(self, command: tuple[Any, ...], limit_s: float = 600) -> list[Any]:
        """Send ``command`` to all workers at once; their answers in rank order."""
        message = pickle.dumps(command)
        for connection in self._connections:
            connection.send_bytes(message)
        return self._answers(limit_s)

    def _answers(self, limit_s: float) -> list[Any]:
        answers = []
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(limit_s):
                    raise ContestantFailed(f"{self.name}, rank {rank}: no answer within {limit_s:g} s\n{self._tail()}")
                answer = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError) as error:
                raise ContestantFailed(f"{self.name}, rank {rank} died:\n{self._tail()}") from error
            if isinstance(answer, Failed):
                raise ContestantFailed(f"{self.name}, rank {rank}:\n{answer.text}")
            answers.append(answer)
        return answers

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._log.close()


class Fleet(Processes):
    """The ranks that train one case with one contestant."""

    def __init__(self, name: str, case: Case) -> None:
        super().__init__("engine_bench.worker", name, case.world_size, asdict(case))

    def steps(self, count: int) -> list[Block]:
        """Run ``count`` steps on all ranks at once."""
        return self.ask(("steps", count))

    def bytes_sent(self) -> list[dict[str, int] | None]:
        return self.ask(("bytes",))


class HostFleet(Processes):
    """One engine's process of the host benchmark."""

    def __init__(self, name: str, num_units: int, reshard: bool) -> None:
        super().__init__("engine_bench.host_worker", name, 1, {"num_units": num_units, "reshard": reshard})

    def steps(self, count: int) -> tuple[float, float]:
        """Seconds per step: forward and backward, optimizer."""
        (answer,) = self.ask(("steps", count))
        return answer


class PeakMemory:
    """Highest sum over some processes of their proportional set size: shared pages are counted once."""

    def __init__(self, pids: list[int], every_s: float = 0.02) -> None:
        self._pids, self._every_s = pids, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self.peak_bytes = max(self.peak_bytes, sum(map(proportional_set_size, self._pids)))


def proportional_set_size(pid: int) -> int:
    """Bytes; 0 for a process that is gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def loopback_bytes() -> int:
    """Bytes that went through the loopback interface since boot: what gloo's TCP connections carry on one machine."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[8])
    return 0
