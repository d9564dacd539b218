"""What the engine really built, in lines for people, and checked against what the config asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_core.describe import ModelReport
from recipes.context import RankContext
from recipes.schema.derived import replicate_groups, shard_groups, sharding_factor
from recipes.schema.engine import PrecisionConfig, ShardingConfig

_SHOWN = 8  # groups, and ranks of a group, before a line is cut


@dataclass(frozen=True)
class BuiltGroups:
    """The engine's report, known to agree with the config."""

    report: ModelReport

    @property
    def sharding_factor(self) -> int:
        return self.report.groups[0].sharding_factor

    def lines(self) -> list[str]:
        report, groups = self.report, self.report.groups[0]
        below_root = report.units[1:]
        kinds = Counter(unit.modules[0] for unit in below_root)
        units = ", ".join([*(f"{number} {kind}" for kind, number in kinds.items()), "root"])
        keeps = "RAF" if all(unit.reshard_after_forward for unit in below_root) else "NRAF"
        flat = report.units[-1].flat_parameters[0]
        return [
            f"sharding: F={groups.sharding_factor} of W={groups.world_size}, {keeps}; units: {units}; "
            f"{report.shard_bytes / 2**20:.1f} MiB of parameters on each rank",
            f"sharding groups {group_text(groups.shard_groups)} by {groups.shard_wire}; "
            f"replication groups {group_text(groups.replicate_groups)} by {groups.replicate_wire}",
            f"precision: compute {flat.compute_dtype}, reduction {flat.reduce_dtype}, parameters {flat.param_dtype}",
            *groups.messages,
        ]


def checked(
    report: ModelReport, sharding: ShardingConfig, precision: PrecisionConfig, context: RankContext
) -> BuiltGroups:
    """Raises RuntimeError naming the first thing that was built otherwise than asked for."""
    world = context.world_size
    factor = sharding_factor(sharding, world, context.local_world_size)
    (groups,) = report.groups
    raf = {unit.reshard_after_forward for unit in report.units[1:]} or {sharding.reshard_after_forward}
    dtypes = {flat.compute_dtype for unit in report.units for flat in unit.flat_parameters}
    compute = dtypes - {"float32"} or dtypes  # batch norms compute in float32 whatever the config says
    for what, asked, built in (
        ("number of ranks", world, groups.world_size),
        ("sharding factor", factor, groups.sharding_factor),
        ("sharding groups", shard_groups(world, factor), [list(row) for row in groups.shard_groups]),
        ("replication groups", replicate_groups(world, factor), [list(row) for row in groups.replicate_groups]),
        ("reshard after forward", {sharding.reshard_after_forward}, raf),
        ("compute dtype", {precision.param_dtype}, compute),
    ):
        if asked != built:
            raise RuntimeError(
                f"the engine did not build what the config asks for: {what}: expected {asked}, got {built}. "
                "Nothing was trained; please report this with config.yaml from the run folder"
            )
    return BuiltGroups(report)


def group_text(groups: Sequence[Sequence[int]]) -> str:
    """``[0 1] [2 3]``; long rows and many rows are cut."""
    rows = [_row(group) for group in groups[:_SHOWN]]
    return " ".join(rows) + (f" ... ({len(groups)} groups)" if len(groups) > _SHOWN else "")


def _row(group: Sequence[int]) -> str:
    shown = " ".join(str(rank) for rank in group[:_SHOWN])
    return f"[{shown}]" if len(group) <= _SHOWN else f"[{shown} ... {group[-1]}]"
