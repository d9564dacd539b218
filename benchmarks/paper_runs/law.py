"""Bytes that the ranks send in one step, by the law of docs/engine.md: direct sends, as the wire ``gloo_p2p`` does."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_core.describe import ModelReport

ITEM = 4  # bytes of an fp32 element
SMALL_BYTES = 64 << 10  # an all-reduce up to here goes whole to every peer


@dataclass(frozen=True)
class Bytes:
    """Of one rank, averaged over all. gather, reduce, replicate: by collective; cross: of them, to other hosts."""

    gather: float
    reduce: float
    replicate: float
    cross: float

    @property
    def total(self) -> float:
        return self.gather + self.reduce + self.replicate


def bytes_of_step(report: ModelReport, reshard: bool, ranks_per_host: int | None = None) -> Bytes:
    """report: of a model whose units run in the order of their ids, after the root, and that trains everything."""
    (group,) = report.groups
    rows, columns = group.shard_groups, group.replicate_groups
    row_cross, column_cross = _remote(rows, ranks_per_host), _remote(columns, ranks_per_host)
    factor, copies = len(rows[0]), len(columns[0])
    gather = reduce = replicate = cross = 0.0
    for unit in report.units:
        is_kept = unit.unit_id in (0, len(report.units) - 1) or factor == 1
        for flat in unit.flat_parameters:
            shard = flat.shard_numel * ITEM
            gathers = 2 if reshard and not is_kept else 1
            to_copy = shard if shard <= SMALL_BYTES else 2 * shard / copies
            gather += gathers * (factor - 1) * shard
            reduce += (factor - 1) * shard
            replicate += (copies - 1) * to_copy
            cross += (gathers + 1) * row_cross * shard + column_cross * to_copy
    return Bytes(gather, reduce, replicate, cross)


def _remote(groups: tuple[tuple[int, ...], ...], ranks_per_host: int | None) -> float:
    """Peers on other hosts that a rank has in its group, averaged over ranks."""
    if ranks_per_host is None:
        return 0.0
    hosts = [[rank // ranks_per_host for rank in group] for group in groups]
    remote = sum(one != other for group in hosts for one in group for other in group)
    return remote / sum(map(len, hosts))
