"""What was really built, as a record: groups, units, bytes. The engine prints nothing; callers may."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fsdp_core.comm.groups import Groups
from fsdp_core.runtime.find import contexts_in


@dataclass(frozen=True)
class FlatParameterReport:
    """One flat parameter of a unit."""

    numel: int
    padded_numel: int
    shard_numel: int
    param_dtype: str
    compute_dtype: str
    reduce_dtype: str
    num_parameters: int
    num_trainable: int


@dataclass(frozen=True)
class UnitReport:
    """One unit."""

    unit_id: int
    name: str
    modules: tuple[str, ...]  # class names
    reshard_after_forward: bool
    flat_parameters: tuple[FlatParameterReport, ...]

    @property
    def numel(self) -> int:
        return sum(flat.numel for flat in self.flat_parameters)


@dataclass(frozen=True)
class GroupReport:
    """The rank table that was built and the wires that were chosen. Rows shard, columns replicate."""

    world_size: int
    sharding_factor: int
    shard_groups: tuple[tuple[int, ...], ...]
    replicate_groups: tuple[tuple[int, ...], ...]
    rank: int
    shard_wire: str
    replicate_wire: str
    messages: tuple[str, ...]


@dataclass(frozen=True)
class ModelReport:
    """Everything ``describe`` knows. Bytes are per rank."""

    groups: tuple[GroupReport, ...]  # one per root
    units: tuple[UnitReport, ...]
    num_parameters: int  # elements, unsharded
    shard_bytes: int  # parameters, persistent
    largest_unit_bytes: int  # gathered, below the root
    root_unit_bytes: int
    lifted: tuple[tuple[str, int, tuple[str, ...]], ...]  # shared parameters: name, bytes, all places


def group_report(groups: Groups) -> GroupReport:
    return GroupReport(
        world_size=groups.world_size,
        sharding_factor=groups.sharding_factor,
        shard_groups=groups.table.rows,
        replicate_groups=groups.table.columns,
        rank=groups.rank,
        shard_wire=groups.shard.name,
        replicate_wire=groups.replicate.name,
        messages=groups.messages,
    )


def describe_model(model: nn.Module) -> ModelReport:
    contexts = contexts_in(model)
    units, shard_bytes, numel = [], 0, 0
    below_root, roots = [0], [0]
    for context in contexts:
        for unit in context.units:
            flats = tuple(
                FlatParameterReport(
                    numel=handle.layout.numel,
                    padded_numel=handle.layout.padded_numel,
                    shard_numel=handle.layout.shard_numel,
                    param_dtype=str(handle.dtypes.param).removeprefix("torch."),
                    compute_dtype=str(handle.dtypes.compute).removeprefix("torch."),
                    reduce_dtype=str(handle.dtypes.reduce).removeprefix("torch."),
                    num_parameters=len(handle.params),
                    num_trainable=sum(parameter.requires_grad for parameter in handle.params),
                )
                for handle in unit.handles
            )
            classes = tuple(type(module).__name__ for module in unit.modules)
            units.append(UnitReport(unit.unit_id, unit.name, classes, unit.reshard_after_forward, flats))
            shard_bytes += sum(handle.sharded.nbytes for handle in unit.handles)
            numel += sum(handle.layout.numel for handle in unit.handles)
            (roots if unit.is_root else below_root).append(unit.full_nbytes)
    lifted = tuple((name, nbytes, tuple(places)) for c in contexts for name, nbytes, places in c.lifted)
    return ModelReport(
        groups=tuple(group_report(context.root.groups) for context in contexts),
        units=tuple(units),
        num_parameters=numel,
        shard_bytes=shard_bytes,
        largest_unit_bytes=max(below_root),
        root_unit_bytes=max(roots),
        lifted=lifted,
    )
