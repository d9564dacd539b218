"""Rules about plans and figures: a profile must know enough of the machine, and a figure has a name."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.check.about import About
from launcher.check.rules.rule import Rules
from launcher.errors import Problem
from launcher.schema import FIGURES, Config
from recipes.schema.derived import unknown_to_plan

RULES = Rules()
_READERS = ("plan", "tune", "figure")
KNOWN_DEVICES = ("a100_80gb", "h100_80gb", "h200", "v100_32gb")  # presets with a data sheet


@RULES.reading("action", "hardware", "cluster.num_nodes", "cluster.nproc_per_node")
def profile_knows_enough(config: Config, about: About) -> Iterator[Problem]:
    if config.action not in _READERS:
        return
    cluster = config.cluster
    world_size = cluster.num_nodes * cluster.nproc_per_node
    if unknown := unknown_to_plan(config.hardware, world_size, cluster.nproc_per_node):
        others = ", ".join(name for name in KNOWN_DEVICES if name != config.hardware.name)
        numbers = " ".join(f"{key}=..." for key in unknown)
        yield about.problem(
            "hardware",
            f"this profile does not know {', '.join(unknown)}",
            got=config.hardware.name,
            remedy=f"{numbers}, another profile (hardware={others}), or action=calibrate for one of this machine",
        )


@RULES.reading("hardware.memory_bytes", "hardware.usable_memory_bytes")
def usable_memory_is_there(config: Config, about: About) -> Iterator[Problem]:
    memory, usable = config.hardware.memory_bytes, config.hardware.usable_memory_bytes
    if memory is not None and usable is not None and usable > memory:
        yield about.problem(
            "hardware.usable_memory_bytes",
            "more than hardware.memory_bytes, which holds what the allocator may take and more",
            got=usable,
            expected=f"at most {memory}",
            remedy="hardware.usable_memory_bytes=null takes 94 % of hardware.memory_bytes",
            also=("hardware.memory_bytes",),
        )


@RULES.reading("action", "sharding.cpu_offload")
def offload_is_not_simulated(config: Config, about: About) -> Iterator[Problem]:
    if config.action in _READERS and config.sharding.cpu_offload:
        yield about.problem(
            "sharding.cpu_offload",
            "copies between host and device are not simulated",
            got=True,
            remedy="sharding.cpu_offload=false",
        )


@RULES.reading("action", "train.compile")
def compilers_are_not_simulated(config: Config, about: About) -> Iterator[Problem]:
    if config.action in _READERS and config.train.compile:
        yield about.problem(
            "train.compile",
            "which kernels a compiler would fuse is not known without running it",
            got=True,
            remedy="train.compile=false: the plan is then an upper bound of time and memory",
        )


@RULES.reading("action", "figure")
def figure_has_a_name(config: Config, about: About) -> Iterator[Problem]:
    if config.action == "figure" and config.figure.name is None:
        yield about.problem(
            "figure.name",
            "which figure?",
            got="null",
            expected=f"one of {', '.join(FIGURES)}",
            remedy="experiment=paper/fig7b",
        )
