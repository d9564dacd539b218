"""Warm ranks on which an experiment runs functions, here or on hosts that are network namespaces."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from engine_bench.fleet import Processes

from paper_runs.namespaces import STORE_ADDRESS, Hosts


class Ranks(Processes):
    """``world_size`` processes in one gloo group, one thread each."""

    def __init__(self, world_size: int, details: dict[str, Any] | None = None) -> None:
        self.world_size = world_size
        super().__init__("paper_runs.rank", f"{world_size} ranks", world_size, details or {})

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = 600) -> list[Any]:
        """``function(rank, *args)`` on every rank, values in rank order. Functions travel by name."""
        return self.ask((function, *args), limit_s)

    def run_each(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], limit_s: float) -> list[Any]:
        """``function(rank, *arguments[rank])``: something else on every rank, at the same time."""
        for connection, args in zip(self._connections, arguments, strict=True):
            connection.send_bytes(pickle.dumps((function, *args)))
        return self._answers(limit_s)


class HostRanks(Ranks):
    """The same, ``ranks_per_host`` consecutive ranks on each of some hosts."""

    def __init__(self, hosts: Hosts, ranks_per_host: int) -> None:
        self._hosts, self._ranks_per_host = hosts, ranks_per_host
        super().__init__(len(hosts) * ranks_per_host, {"store": STORE_ADDRESS})

    def _entrance(self, rank: int) -> list[str]:
        return self._hosts.entrance(rank // self._ranks_per_host)

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), "GLOO_SOCKET_IFNAME": "eth0"}


class Pool:
    """Ranks by number, started when first asked for and kept for all experiments."""

    def __init__(self) -> None:
        self._found: dict[int, Ranks] = {}

    def __call__(self, world_size: int) -> Ranks:
        if world_size not in self._found:
            self._found[world_size] = Ranks(world_size)
        return self._found[world_size]

    def close(self) -> None:
        for ranks in self._found.values():
            ranks.close()
        self._found.clear()
