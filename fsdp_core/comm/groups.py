"""The groups of ranks a root talks in, and their wires. Built once per (process group, F) and shared."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp_core.comm.local import LocalWire
from fsdp_core.comm.select import choose_wire, timeout_of
from fsdp_core.comm.streams import Streams, streams_for
from fsdp_core.comm.wire import Wire
from fsdp_core.errors import WrapError
from fsdp_core.layout.mesh import RankTable, build_rank_table
from fsdp_core.policy import WireChoice


@dataclass(frozen=True, eq=False)
class Groups:
    """Who shards with whom, who replicates with whom, and the wires between them.

    shard: the wire of this rank's row (F ranks); replicate: of its column (W/F ranks); world: of all W ranks.
    """

    table: RankTable
    rank: int
    shard: Wire
    replicate: Wire
    world: Wire
    messages: tuple[str, ...]  # what the choice of wires wants the user to know
    has_peers: bool = True  # False: the other ranks exist on paper only, there is nothing to agree on

    @property
    def world_size(self) -> int:
        return self.table.world_size

    @property
    def sharding_factor(self) -> int:
        return self.table.sharding_factor

    def __deepcopy__(self, memo: dict[int, Any]) -> Groups:
        return self  # processes cannot be copied


class RankStandIn(abc.ABC):
    """What may stand in place of a process group whose other ranks exist on paper only (``fsdp_core.simulate``)."""

    rank: int
    world_size: int

    @abc.abstractmethod
    def wire(self, ranks: tuple[int, ...], ranks_per_host: int | None) -> Wire: ...

    @abc.abstractmethod
    def streams(self) -> Streams: ...


def largest_anywhere(values: Sequence[int], *, process_group: Any, mesh: Any, device: torch.device) -> list[int]:
    """The largest of each number over all ranks that take part; it can be asked before any group is built."""
    if isinstance(process_group, RankStandIn) or not (dist.is_available() and dist.is_initialized()):
        return list(values)
    groups = [process_group] if mesh is None else [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]
    most = torch.tensor(values, dtype=torch.int64, device=device)
    for group in groups:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return most.tolist()


def streams_of(process_group: Any, device: torch.device) -> Streams:
    """The streams that the collectives of ``process_group`` are ordered on."""
    return process_group.streams() if isinstance(process_group, RankStandIn) else streams_for(device)


_torch_groups: dict[tuple[Any, tuple[tuple[int, ...], ...]], dict[tuple[int, ...], Any]] = {}


def build_groups(
    *,
    process_group: Any,
    mesh: Any,
    sharding_factor: int | None,
    wire: WireChoice,
    device: torch.device,
    ranks_per_host: int | None = None,
    expected_bytes: int = 0,
    gradient_bytes: int = 0,
) -> Groups:
    """Collective over all ranks that take part. Without torch.distributed: one rank on its own.

    expected_bytes, gradient_bytes: what this rank will ask for of its sharding and of its replication wire, about.
    """
    if isinstance(process_group, RankStandIn):
        return _on_paper(process_group, sharding_factor, ranks_per_host)
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None or mesh is not None:
            raise WrapError(
                "A process group or mesh was given but torch.distributed is not initialised.",
                remedy="call torch.distributed.init_process_group first",
            )
        return _single_rank(build_rank_table([0], sharding_factor), 0, device)
    if mesh is not None:
        return _from_mesh(
            mesh, process_group, sharding_factor, wire, device, ranks_per_host, expected_bytes, gradient_bytes
        )
    parent = process_group if process_group is not None else dist.group.WORLD
    ranks = dist.get_process_group_ranks(parent)
    table = build_rank_table(ranks, sharding_factor)
    rank = dist.get_rank()
    if len(ranks) == 1:
        return _single_rank(table, rank, device)
    subgroups = _subgroups(parent, table, rank, device, [parent])
    return _wired(table, rank, subgroups, wire, device, ranks_per_host, expected_bytes, gradient_bytes)


def _from_mesh(
    mesh: Any,
    process_group: Any,
    sharding_factor: int | None,
    wire: WireChoice,
    device: torch.device,
    ranks_per_host: int | None,
    expected_bytes: int,
    gradient_bytes: int,
) -> Groups:
    """A 1-D mesh is the sharding group; a 2-D mesh is (replicate, shard). Other axes belong to others."""
    if process_group is not None:
        raise WrapError("Give a process group or a mesh, not both.", got="both")
    if mesh.ndim not in (1, 2):
        raise WrapError(
            "The mesh must have one axis (shard) or two (replicate, shard).",
            expected="1 or 2 axes",
            got=f"{mesh.ndim} axes",
            remedy="slice the axes that belong to the engine out of the larger mesh by name",
        )
    rows = mesh.mesh.tolist() if mesh.ndim == 2 else [mesh.mesh.tolist()]
    table = RankTable(tuple(tuple(row) for row in rows))
    if sharding_factor is not None and sharding_factor != table.sharding_factor:
        if mesh.ndim == 2:
            raise WrapError(
                "The sharding factor contradicts the mesh.",
                expected=f"{table.sharding_factor}, the size of the mesh's last axis",
                got=sharding_factor,
            )
        table = build_rank_table(table.rows[0], sharding_factor)
    rank = dist.get_rank()
    if table.world_size == 1:
        return _single_rank(table, rank, device)
    axes = [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]
    subgroups = _subgroups(("mesh", tuple(sum(table.rows, ()))), table, rank, device, axes)
    return _wired(table, rank, subgroups, wire, device, ranks_per_host, expected_bytes, gradient_bytes)


def _on_paper(ranks: RankStandIn, sharding_factor: int | None, ranks_per_host: int | None) -> Groups:
    table = build_rank_table(range(ranks.world_size), sharding_factor)
    rank = ranks.rank
    members = (table.shard_group(rank), table.replicate_group(rank), tuple(range(ranks.world_size)))
    wires = {group: ranks.wire(group, ranks_per_host) for group in set(members)}
    shard, replicate, world = (wires[group] for group in members)
    return Groups(table, rank, shard, replicate, world, (), has_peers=False)


def _single_rank(table: RankTable, rank: int, device: torch.device) -> Groups:
    local = LocalWire(device)
    return Groups(table, rank, local, local, local, ())


def _subgroups(
    parent: Any, table: RankTable, rank: int, device: torch.device, spanning: Sequence[Any]
) -> dict[tuple[int, ...], Any]:
    """torch groups of this rank's row, column and of all ranks of the table.

    Only members call ``new_group`` (``use_local_synchronization``): the ranks outside need not know.

    Args:
        spanning: existing groups that connect all ranks of the table, one hop after the other.
    """
    cached = _torch_groups.get((parent, table.rows))
    if cached is not None:
        return cached
    everyone = tuple(sum(table.rows, ()))
    found: dict[tuple[int, ...], Any] = {}
    whole = parent if isinstance(parent, dist.ProcessGroup) else dist.group.WORLD
    assert whole is not None
    timeout = timeout_of(whole, device)
    if isinstance(parent, dist.ProcessGroup):
        found[everyone] = parent
    wanted = [everyone, table.shard_group(rank), table.replicate_group(rank)]
    missing = list(dict.fromkeys(ranks for ranks in wanted if len(ranks) > 1 and ranks not in found))
    if missing:
        _even_out_group_counts(spanning, rank, device)
    for ranks in missing:
        found[ranks] = dist.new_group(list(ranks), use_local_synchronization=True, timeout=timeout)
    _torch_groups[(parent, table.rows)] = found
    return found


def _even_out_group_counts(spanning: Sequence[Any], rank: int, device: torch.device) -> None:
    """Make the number of groups that this process knows the same on all ranks of ``spanning``.

    torch names a locally synchronised group after its ranks and after how many groups the process has seen. Ranks
    that belong to different earlier groups would wait for each other under different names, without end. A group of
    one costs no communication and counts.
    """
    known = len(dist.distributed_c10d._world.pg_names)
    most = torch.tensor(known, dtype=torch.int64, device=device)
    for group in spanning:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    for _ in range(int(most) - known):
        dist.new_group([rank], use_local_synchronization=True)


def _wired(
    table: RankTable,
    rank: int,
    subgroups: dict[tuple[int, ...], Any],
    wire: WireChoice,
    device: torch.device,
    ranks_per_host: int | None,
    expected_bytes: int,
    gradient_bytes: int,
) -> Groups:
    everyone = tuple(sum(table.rows, ()))
    wires: dict[tuple[int, ...], Wire] = {}
    messages: list[str] = []
    for ranks, nbytes in (
        (table.shard_group(rank), expected_bytes),
        (table.replicate_group(rank), gradient_bytes),
        (everyone, 0),
    ):
        if ranks in wires:
            continue
        if len(ranks) == 1:
            wires[ranks] = LocalWire(device)
            continue
        selection = choose_wire(
            wire,
            group=subgroups[ranks],
            ranks=ranks,
            device=device,
            ranks_per_host=ranks_per_host,
            expected_bytes=nbytes,
        )
        wires[ranks] = selection.wire
        if selection.message:
            messages.append(selection.message)
    groups = Groups(
        table,
        rank,
        wires[table.shard_group(rank)],
        wires[table.replicate_group(rank)],
        wires[everyone],
        tuple(messages),
    )
    weakref.finalize(groups, _close_all, tuple(wires.values()))  # the last model on these wires is gone
    return groups


def _close_all(wires: tuple[Wire, ...]) -> None:
    for wire in wires:
        wire.close()
