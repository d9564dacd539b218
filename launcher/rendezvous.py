"""Ranks meet: the key-value store, facts every rank tells the others, the process group, leaving together."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.environment import JoinedRanks
from launcher.errors import ConfigErrors, Problem
from launcher.rank_plan import LOOPBACK, loopback_interface
from launcher.slurm.store import store_of

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_RUN_DIR_KEY = "fsdp_launcher/run_dir"
_JOIN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")


class Meeting:
    """All ranks of the run, connected through a store. One rank alone needs no store."""

    def __init__(self, ranks: JoinedRanks, store: dist.Store | None, kept: dist.Store | None = None) -> None:
        """``kept``: may outlive the ranks, where torchrun starts them again."""
        self.ranks = ranks
        self._store, self._kept = store, kept
        self._num_exchanges = 0

    @classmethod
    def of_local_ranks(cls, ranks: JoinedRanks, listen_fd: int | None, timeout_s: float) -> Meeting:
        """Ranks that our launcher started: rank 0 serves on the socket that the launcher opened and it inherited."""
        if ranks.world_size == 1:
            return cls(ranks, None)
        store = dist.TCPStore(
            LOOPBACK,
            int(os.environ["MASTER_PORT"]),
            ranks.world_size,
            is_master=listen_fd is not None,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listen_fd,
        )
        return cls(ranks, store)

    @classmethod
    def of_joined_ranks(cls, ranks: JoinedRanks, timeout_s: float) -> Meeting:
        """Ranks that somebody else started: they meet where MASTER_ADDR and MASTER_PORT say; tasks of a SLURM step on
        the step's first node.

        Raises:
            ConfigErrors: these variables are not set.
            RuntimeError: the ranks of a step do not find each other.
        """
        if ranks.world_size == 1:
            return cls(ranks, None)
        if ranks.step is not None:
            return cls(ranks, store_of(ranks.step, timeout_s))
        absent = [name for name in _JOIN_VARIABLES if not os.environ.get(name)]
        if absent:
            problem = Problem(
                what=f"the ranks cannot find each other: {' and '.join(absent)} is not set",
                got=f"WORLD_SIZE={ranks.world_size}",
                source="environment",
                remedy="set both to where rank 0 can be reached, or start with torchrun, which sets them",
            )
            raise ConfigErrors([problem])
        if os.environ["MASTER_ADDR"] in (LOOPBACK, "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
        rendezvous = dist.rendezvous("env://", ranks.rank, ranks.world_size, timeout=timedelta(seconds=timeout_s))
        store, _, _ = next(rendezvous)
        # torchrun's store may outlive the ranks: what an earlier attempt left there (addresses!) must not be found.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(ranks, dist.PrefixStore(f"attempt_{attempt}", store), kept=store)

    def exchange(self, fact: object) -> list[Any]:
        """What every rank brought, in rank order; facts are plain JSON. Every rank calls this, in the same order."""
        if self._store is None:
            return [fact]
        prefix = f"launcher/{self._num_exchanges}"
        self._num_exchanges += 1
        self._store.set(f"{prefix}/{self.ranks.rank}", json.dumps(fact))
        return [json.loads(self._store.get(f"{prefix}/{rank}")) for rank in range(self.ranks.world_size)]

    def recall_run_dir(self) -> Path | None:
        """The folder of this run before torchrun started its ranks again; None at the first start."""
        if self._kept is None or not self._kept.check([_RUN_DIR_KEY]):
            return None
        return Path(self._kept.get(_RUN_DIR_KEY).decode())

    def remember_run_dir(self, run_dir: Path) -> None:
        if self._kept is not None:
            self._kept.set(_RUN_DIR_KEY, str(run_dir))

    def make_process_group(self, device: torch.device, timeout_s: float) -> None:
        """The default process group; one rank alone gets none."""
        if self._store is None:
            return
        dist.init_process_group(
            BACKENDS[device.type],
            store=dist.PrefixStore("group", self._store),
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )

    def leave_together(self) -> None:
        """Returns when every rank is here; rank 0, which may serve the store, when all others need it no more."""
        self.exchange("done")
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._store is None:
            return
        if self.ranks.rank != 0:
            self._store.set(f"launcher/left/{self.ranks.rank}", "1")
            return
        self._store.wait([f"launcher/left/{rank}" for rank in range(1, self.ranks.world_size)])


def agreed_device(meeting: Meeting, wanted: str, hostname: str) -> tuple[torch.device, tuple[str, ...]]:
    """(this rank's device, every rank's host name) for ranks that somebody else started.

    wanted: ``cluster.device``; ``auto`` is cuda where every rank of every host has a GPU of its own, else cpu.

    Raises:
        RuntimeError: cuda was asked for and a rank has no GPU of its own; the same on every rank.
    """
    index = _gpu_index(meeting.ranks) if wanted != "cpu" else None
    own = None if index is None else str(torch.cuda.get_device_properties(index).uuid)
    facts = meeting.exchange({"host": hostname, "gpu": own})
    hostnames = tuple(str(fact["host"]) for fact in facts)
    taken = [(fact["host"], fact["gpu"]) for fact in facts]
    without = [rank for rank, gpu in enumerate(taken) if gpu[1] is None or taken.count(gpu) > 1]
    if index is not None and not without:
        return torch.device("cuda", index), hostnames
    if wanted == "cuda":
        where = ", ".join(f"rank {rank} on {hostnames[rank]}" for rank in without)
        raise RuntimeError(f"cluster.device=cuda wants a GPU of its own for every rank; without one: {where}")
    return torch.device("cpu"), hostnames


def _gpu_index(ranks: JoinedRanks) -> int | None:
    """The GPU of the local rank; a rank that sees a single one was perhaps given just that by whoever started it."""
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1:
        return 0
    return ranks.local_rank if ranks.local_rank < num_gpus else None
