"""How the ranks of one group find each other while a wire is being set up: everybody tells everybody one record."""

from __future__ import annotations

import abc
import itertools
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class Rendezvous(abc.ABC):
    """``exchange`` is collective over the group: one JSON-able record in, all ranks' records out, in group order."""

    ranks: tuple[int, ...]  # global ranks, in group order
    group_rank: int

    @abc.abstractmethod
    def exchange(self, record: dict[str, Any]) -> list[dict[str, Any]]: ...


class GroupRendezvous(Rendezvous):
    """Over a torch process group whose backend moves CPU tensors."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.group_rank = dist.get_rank(group)

    def exchange(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        records: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(records, record, group=self._group)
        return records


class StoreRendezvous(Rendezvous):
    """Over a torch key-value store, for groups that have no process group. ``name`` must be new for each wire."""

    def __init__(
        self,
        store: dist.Store,
        ranks: Sequence[int],
        global_rank: int,
        name: str,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self.ranks = tuple(ranks)
        self.group_rank = self.ranks.index(global_rank)
        self._store = dist.PrefixStore(f"fsdp_core/{name}/{'-'.join(map(str, self.ranks))}", store)
        self._timeout = timeout
        self._round = itertools.count()

    def exchange(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        turn = next(self._round)
        self._store.set(f"{turn}/{self.group_rank}", json.dumps(record))
        keys = [f"{turn}/{peer}" for peer in range(len(self.ranks))]
        self._store.wait(keys, self._timeout)
        return [json.loads(self._store.get(key)) for key in keys]
