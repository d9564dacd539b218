"""Rules about what goes to SLURM: what sbatch and srun can read, options that are ours, limits that leave time."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from launcher.check.about import About
from launcher.check.near import did_you_mean, near
from launcher.check.rules.rule import Rules
from launcher.errors import Problem
from launcher.schema import Config
from launcher.slurm.fields import SlurmFields
from launcher.slurm.lead import SLURM_CLOCK_S, START_UP_S, is_limit_too_short, lead_s, measured_save_s, shortest_limit_s
from launcher.slurm.options import OUR_SRUN, OURS, PASSED_ON
from launcher.time_limit import canonical
from recipes.data.files import expanded

RULES = Rules()
ACTIONS = ("train", "check", "print_script", "sweep")
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)


def _is_slurm(config: Config) -> bool:
    return config.cluster.kind == "slurm"


@RULES.reading("cluster.kind", "action")
def actions(config: Config, about: About) -> Iterator[Problem]:
    if _is_slurm(config) and config.action not in ACTIONS:
        yield about.problem(
            "action",
            "cluster=slurm submits training; this action runs where it is typed",
            got=config.action,
            expected=", ".join(ACTIONS),
            remedy="leave cluster=slurm out, or run it inside a job: srun fsdp-launch ...",
            also=("cluster.kind",),
        )
    if config.action == "print_script" and not _is_slurm(config):
        yield about.problem(
            "action",
            "only cluster=slurm has a script",
            got="print_script",
            remedy="cluster=slurm",
            also=("cluster.kind",),
        )


@RULES.reading("cluster")
def belongs_to_slurm(config: Config, about: About) -> Iterator[Problem]:
    """A key that nothing would read is a misunderstanding if somebody typed it; a preset may serve all clusters."""
    if _is_slurm(config) or about.joined is not None:
        return
    for item in dataclasses.fields(SlurmFields):
        key = f"cluster.{item.name}"
        if about.sources.text(key) is not None:
            yield about.problem(
                key,
                f"only SLURM reads this, and the cluster is {config.cluster.kind}",
                got=about.sources.text(key),
                remedy="cluster=slurm, or leave it out",
                also=("cluster.kind",),
            )


@RULES.reading("cluster")
def one_line_each(config: Config, about: About) -> Iterator[Problem]:
    """Every value stands on one line of the script."""
    if not _is_slurm(config):
        return
    for item in dataclasses.fields(SlurmFields):
        key, value = f"cluster.{item.name}", getattr(config.cluster, item.name)
        texts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and ("\n" in text or "\r" in text) for text in texts):
            yield about.problem(key, "a line of the script cannot hold a line break", got=repr(value))
        elif value == "" or (isinstance(value, list) and "" in value):
            yield about.problem(key, "there is nothing in it", got="''", remedy="null, or leave it out")


@RULES.reading("cluster.kind", "run.dir", "sweep.dir")
def one_line_for_folders(config: Config, about: About) -> Iterator[Problem]:
    """The folder stands in the script, too, with the folder it was typed in."""
    for key, path in (("run.dir", config.run.dir), ("sweep.dir", config.sweep.dir)) if _is_slurm(config) else ():
        if path is None and key == "sweep.dir":
            continue
        where = str(expanded(path or ".").absolute())
        if "\n" in where or "\r" in where:
            yield about.problem(
                key, "a line of the script cannot hold a line break", got=repr(where), remedy="a folder without one"
            )


@RULES.reading("cluster.sbatch")
def passed_on(config: Config, about: About) -> Iterator[Problem]:
    for name in config.cluster.sbatch if _is_slurm(config) else ():
        key = f"cluster.sbatch.{name}"
        if name in OURS:
            remedy = f"it is decided by {OURS[name]}" if OURS[name] else "leave it out: the launcher decides it"
            yield about.problem(key, "this option of sbatch has its own key, or is ours", got=name, remedy=remedy)
        elif name not in PASSED_ON:
            yield about.problem(
                key,
                "sbatch has no such option",
                got=name,
                expected="the long name of an option of sbatch, without dashes",
                remedy=did_you_mean(near(name, sorted({*PASSED_ON, *OURS}))),
            )


@RULES.reading("cluster.srun_args")
def srun_arguments(config: Config, about: About) -> Iterator[Problem]:
    for word in config.cluster.srun_args if _is_slurm(config) else ():
        if not word.startswith("-"):
            yield about.problem(
                "cluster.srun_args", "this is no option", got=word, expected="--name=value", remedy="[--cpu-bind=cores]"
            )
        elif word.partition("=")[0] in OUR_SRUN:
            yield about.problem("cluster.srun_args", "the launcher sets this option", got=word, remedy="leave it out")


@RULES.reading("cluster")
def resources(config: Config, about: About) -> Iterator[Problem]:
    cluster = config.cluster
    if not _is_slurm(config):
        return
    if cluster.gres is not None and cluster.gpus_per_node is not None:
        yield about.problem(
            "cluster.gres",
            "both gres and gpus_per_node ask for GPUs",
            got=cluster.gres,
            also=("cluster.gpus_per_node",),
        )
    gpus = cluster.gpus_per_node
    if cluster.device == "cuda" and gpus is not None and gpus < cluster.nproc_per_node:
        yield about.problem(
            "cluster.gpus_per_node",
            "fewer GPUs than ranks on each node",
            got=gpus,
            expected=f"at least cluster.nproc_per_node = {cluster.nproc_per_node}",
            remedy="leave gpus_per_node out: it follows from the ranks",
            also=("cluster.nproc_per_node", "cluster.device"),
        )
    if cluster.memory is not None and not _MEMORY.fullmatch(cluster.memory):
        yield about.problem(
            "cluster.memory",
            "this is no amount of memory",
            got=cluster.memory,
            expected="64G, 500M, 0 for all",
            remedy="64G",
        )
    if cluster.container_mounts and cluster.container_image is None:
        yield about.problem(
            "cluster.container_mounts", "there is no container to mount into", remedy="cluster.container_image=IMAGE"
        )


@RULES.reading("cluster", "model", "data", "optimizer", "run.dir")
def time_to_save(config: Config, about: About) -> Iterator[Problem]:
    save_s = measured_save_s(config.run.dir)
    if not _is_slurm(config) or not is_limit_too_short(config, save_s):
        return
    lead, shortest = lead_s(config, save_s), shortest_limit_s(config, save_s)
    yield about.problem(
        "cluster.time_limit",
        "the time limit leaves no time to train: saving begins before the run has started",
        got=config.cluster.time_limit,
        expected=f"at least {canonical(shortest)}: the run is told to save {lead} s ahead, "
        f"SLURM's clock may be {SLURM_CLOCK_S} s early, and starting takes about {START_UP_S} s",
        remedy=f"cluster.time_limit={canonical(2 * shortest)}, or a smaller cluster.grace_s or cluster.signal_lead_s",
        also=("cluster.grace_s", "cluster.signal_lead_s"),
    )
