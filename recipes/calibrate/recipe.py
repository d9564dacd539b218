"""``run``: one rank of ``action=calibrate``. All ranks measure at the same time; rank 0 tells and writes."""

from __future__ import annotations

import dataclasses
import os
import platform
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from fsdp_core.comm.groups import Groups, build_groups
from fsdp_core.simulate import tape as t
from fsdp_core.simulate.timeline import kernel_s as simulated_kernel_s
from recipes.calibrate import links, profile, rates, units
from recipes.calibrate.profile import Value
from recipes.calibrate.stopwatch import Stopwatch
from recipes.context import RankContext
from recipes.data.files import expanded
from recipes.data.records import DataInfo
from recipes.plan.aside import first_line, in_one_line
from recipes.plan.machine import machine_for_memory
from recipes.plan.samples import expected_info
from recipes.ranks import Ranks
from recipes.report import Report
from recipes.schema import RecipeConfig
from recipes.schema.training import HardwareConfig
from recipes.seeds import choose_kernels
from recipes.sizes import UnknownSize

_NUM_MEASUREMENTS = 60  # about: what the time given is divided by
_CPU_ELEMENTWISE, _CUDA_ELEMENTWISE = 1 << 20, 1 << 28  # bytes, where no unit says


@dataclass(frozen=True)
class Calibrated:
    """values: of the profile. path: where it was written."""

    values: tuple[Value, ...]
    path: Path


def run(config: RecipeConfig, context: RankContext) -> Calibrated:
    """Prints what it measures, then the table, and leaves the profile (rank 0). Called by every rank."""
    ranks, report = Ranks.of(context), Report.of(context)
    choose_kernels(config.run)
    watch = Stopwatch(ranks, config.calibrate.seconds / _NUM_MEASUREMENTS)
    measuring = _Measuring(config, context, watch, report)
    values = tuple(measuring.all())
    asked = config.calibrate
    folder = Path(context.run_dir) / "configs" if asked.dir is None else expanded(asked.dir).absolute()
    path = folder / profile.GROUP / f"{asked.name}.yaml"
    if context.is_main:
        what = f"{measuring.what()}, measured on {date.today()} with {ranks.world_size} ranks."
        profile.write(folder, asked.name, profile.yaml_of(values, what, folder, asked.name))
    report.line(profile.table_of(values))
    report.line(f"profile: {path}")
    report.line(f"to use it: fsdp-launch --config-dir {folder} hardware={asked.name} ...")
    report.close()
    return Calibrated(values, path)


class _Measuring:
    """One calibration, a part after the other; each tells what it found as soon as it is known."""

    def __init__(self, config: RecipeConfig, context: RankContext, watch: Stopwatch, report: Report) -> None:
        self._config, self._context, self._watch, self._report = config, context, watch, report
        self._device = watch.ranks.device
        self._found = HardwareConfig(name=config.calibrate.name, device=self._device.type)

    def what(self) -> str:
        if self._device.type == "cuda":
            return torch.cuda.get_device_name(self._device)
        return f"{platform.machine()}, {torch.get_num_threads()} threads a rank"

    def all(self) -> list[Value]:
        kinds, why_no_units = self._kinds()
        values = [Value("name", self._found.name), Value("device", self._device.type)]
        values += [*self._matrices(), self._size(), *self._memory(kinds), *self._issuing()]
        values += [*self._links(), self._units(kinds, why_no_units)]
        return values

    def _kinds(self) -> tuple[list[units.UnitKind], str]:
        """The model's units, and why there are none."""
        try:
            info: DataInfo = expected_info(self._config)
            found = units.kinds_of(self._config, info, self._watch.ranks.world_size)
        except UnknownSize as unknown:
            return [], str(unknown)
        except Exception as error:  # a plugin's model may do what has no answer on a device without memory
            return [], in_one_line(error)
        return found, "" if found else "the model names no units"

    def _matrices(self) -> list[Value]:
        values = []
        for name in rates.DTYPES:
            self._say(f"matrix products in {name}")
            rate = rates.matrix_rate(self._watch, getattr(torch, name))
            about = "torch.mm, the best size" if rate else "this device has no such product"
            values.append(self._keep(f"peak_flops_{name}", rate, about))
        return values

    def _size(self) -> Value:
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            return self._keep("memory_bytes", int(total), "the device's")
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        per_rank = whole // self._context.local_world_size
        return self._keep("memory_bytes", per_rank, "the host's, divided among its ranks")

    def _memory(self, kinds: list[units.UnitKind]) -> list[Value]:
        self._say("memory")
        usual = _CPU_ELEMENTWISE if self._device.type == "cpu" else _CUDA_ELEMENTWISE
        size = units.input_bytes(kinds[0]) if kinds and self._device.type == "cpu" else usual
        found = rates.memory_rate(self._watch, size or usual)
        about = f"of it, a product with a new result of {found.elementwise_bytes:,} bytes"
        return [
            self._keep("memory_bytes_per_s", found.bytes_per_s, "copies, the best size"),
            self._keep("memory_efficiency", found.efficiency, about),
        ]

    def _issuing(self) -> list[Value]:
        self._say("small operations")
        host_s = rates.issue_s(self._watch)
        shortest_s = rates.kernel_s(self._watch, host_s)
        on_cpu = "; on CPU the same" if self._device.type == "cpu" else ""
        return [
            self._keep("launch_s", host_s, "an operation on one element"),
            self._keep("kernel_s", shortest_s, f"the shortest{on_cpu}"),
        ]

    def _links(self) -> list[Value]:
        context, world = self._context, self._context.world_size
        local, hosts = context.local_world_size, context.num_nodes
        values = [Value("devices_per_host", local)]
        groups = None
        if world > 1:
            groups = build_groups(
                process_group=None,
                mesh=None,
                sharding_factor=local,
                wire=self._config.sharding.wire,  # type: ignore[arg-type]  # the checker allows the engine's only
                device=self._device,
                ranks_per_host=local,
                expected_bytes=1 << 27,
            )
        intra = self._line(groups, local, "intra") if groups is not None and local > 1 else None
        whole = self._line(groups, world, "cross") if groups is not None and hosts > 1 else None
        about = "no link: one rank" if local == 1 else "" if groups is None else f"wire {groups.shard.name}"
        values += self._link_values("intra_host", "intra", intra, about, None if intra is None else intra.step_s)
        step_s = None if whole is None else links.cross_step_s(whole, intra, world, hosts)
        values += self._link_values("cross_host", "cross", whole, "no link: one host" if hosts == 1 else "", step_s)
        if groups is None:
            return values
        self._say("computing beside a collective")
        wire = groups.shard if local > 1 else groups.world
        slowdown = links.overlap_slowdown(wire, self._watch)
        about = "computing stands still" if slowdown == links.MOST_SLOWDOWN else "a reduce-scatter beside torch.mm"
        return [*values, self._keep("overlap_slowdown", slowdown, about)]

    def _line(self, groups: Groups, num_ranks: int, where: str) -> links.Line:
        wire = groups.shard if where == "intra" else groups.world
        self._say(f"collectives of {num_ranks} ranks by {wire.name}")
        times = links.measure(wire, self._watch)
        line = links.fitted(times, num_ranks)
        for one in times:
            fitted_s = line.seconds(one, num_ranks)
            self._report.line(
                f"  {one.primitive:<15} {one.nbytes:>11,} bytes  {1e6 * one.seconds:>9.1f} us, "
                f"by the fit {1e6 * fitted_s:.1f} us"
            )
        return line

    def _link_values(
        self, rate_name: str, name: str, line: links.Line | None, about: str, step_s: float | None
    ) -> list[Value]:
        if line is None:
            return [self._keep(f"{rate_name}_bytes_per_s", None, about)]
        return [
            self._keep(f"{rate_name}_bytes_per_s", line.bytes_per_s, f"fitted to all sizes{about and f', {about}'}"),
            self._keep(f"{name}_efficiency", 1.0, "in the rate already"),
            self._keep(f"{name}_reduce_ratio", line.reduce_ratio, "fitted"),
            self._keep(f"{name}_step_s", step_s, "fitted"),
        ]

    def _units(self, kinds: list[units.UnitKind], why_not: str) -> Value:
        """Last: it uses everything that was measured before."""
        key = "compute_efficiency"
        if not kinds:
            return self._keep(key, None, why_not)
        if self._peak() is None:
            return self._keep(key, None, f"no product in {self._config.precision.param_dtype}")
        hardware = machine_for_memory(self._found, self._context.local_world_size).hardware

        def simulated(kernel: t.Kernel, efficiency: float) -> float:
            return simulated_kernel_s(kernel, dataclasses.replace(hardware, compute_efficiency=efficiency))

        seconds = []
        try:
            for kind in kinds:
                self._say(f"unit {kind.name}")
                seconds.append(units.unit_s(kind, self._watch))
                self._report.line(f"  forward and backward of {kind.name}: {1e3 * seconds[-1]:.3g} ms")
        except (TypeError, RuntimeError) as error:  # it wants inputs that only its model can give
            return self._keep(key, None, f"a unit cannot be run alone: {first_line(error)}")
        found = units.efficiency_of(kinds, seconds, simulated)
        names = ", ".join(f"{kind.name} {1e3 * one:.3g} ms" for kind, one in zip(kinds, seconds, strict=True))
        return self._keep(key, found, f"one unit forward and backward: {names}")

    def _peak(self) -> float | None:
        return getattr(self._found, f"peak_flops_{self._config.precision.param_dtype}")

    def _keep(self, key: str, value: float | int | None, about: str) -> Value:
        setattr(self._found, key, value)
        return Value(key, value, about)

    def _say(self, what: str) -> None:
        self._context.flight.event("progress", what)
        self._report.line(f"measuring {what} ...")
