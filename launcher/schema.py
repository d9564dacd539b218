"""The whole config: a recipe plus what the launcher itself needs."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.slurm.fields import SlurmFields
from recipes.schema.fields import described
from recipes.schema.recipe import RecipeConfig

LONGEST_S = 1e8  # three years: clocks and timeouts of other libraries overflow not far above
ACTIONS = (
    "train",
    "check",
    "plan",
    "tune",
    "calibrate",
    "figure",
    "eval",
    "generate",
    "export",
    "inspect",
    "print_script",
    "sweep",
)

FIGURES = ("2a", "2b", "6a", "6b", "6c", "7a", "7b", "7c", "8a", "8b", "8c")


@dataclass
class RankFields:
    """What every kind of cluster reads. W is num_nodes x nproc_per_node."""

    kind: str = described(
        "local",
        "local: processes on this machine; torchrun: join ranks that exist; slurm: submit",
        choices=("local", "torchrun", "slurm"),
    )
    num_nodes: int = described(1, "hosts", at_least=1, at_most=1_000_000)
    nproc_per_node: int = described(
        2, "ranks of one host (one GPU each where there are GPUs)", at_least=1, at_most=1024
    )
    device: str = described(
        "auto", "auto: cuda where every local rank gets a GPU, else cpu", choices=("auto", "cpu", "cuda")
    )
    cpu_threads_per_rank: int | None = described(
        None, "threads of one rank; null: the machine's cores divided among ranks", at_least=1, at_most=1024
    )
    time_limit: str | None = described(None, "24:00:00, 1-12:00:00 or seconds; null: none")
    grace_s: float = described(
        60.0, "seconds a signalled rank may take to reach a step boundary", at_least=0, at_most=LONGEST_S
    )
    collective_timeout_s: float = described(
        600.0, "seconds without progress of any rank that count as a hang", at_least=1, at_most=LONGEST_S
    )
    slow_phase_timeout_s: float = described(
        1800.0, "the same while ranks start up (first step included), save or close", at_least=1, at_most=LONGEST_S
    )
    max_restarts: int = described(
        0, "times a failed run is started again, from its newest checkpoint (docs/faults.md)", at_least=0
    )
    env: dict[str, str] = described({}, "environment variables of every rank (NCCL_... and others)")


@dataclass
class ClusterConfig(SlurmFields, RankFields):
    """How ranks come to be. (A dataclass lists the fields of its last base first.)"""


@dataclass
class SweepConfig:
    """Sweeps (``-m``). The folder keeps what it was started with; ``action=sweep`` works on a folder."""

    dir: str | None = described(None, "folder of the sweep; null: a new one under sweeps/")
    max_parallel: int = described(1, "jobs at once; cores and GPUs are divided among them", at_least=1, at_most=100_000)
    wait: bool = described(False, "return only when all jobs have ended (SLURM; local jobs are always waited for)")
    do: str | None = described(None, "with action=sweep", choices=("status", "collect", "resume", "retry", "cancel"))
    refuse_oom: bool | None = described(
        None,
        "jobs that cannot fit hardware's memory, by their plans: true: the sweep is refused (exit code 3); null: told, "
        "and started; false: nobody looks",
    )
    fail_fast: bool = described(False, "the first failed job ends the others; false: the others go on")
    metric: str | None = described(
        None, "what jobs are compared by: a column of results.csv; null: held-out loss where there is one"
    )
    direction: str = described(
        "minimize", "whether a small or a large metric is good", choices=("minimize", "maximize")
    )
    sweeper: str = described(
        "grid",
        "grid: every combination; optuna: a search (the same as hydra/sweeper=optuna)",
        choices=("grid", "optuna"),
    )
    trials: int = described(20, "jobs of a search", at_least=1, at_most=100_000)
    sampler: str = described("tpe", "how a search chooses", choices=("tpe", "random"))
    sampler_seed: int = described(0, "seed of the search's own choices", at_least=0, at_most=4_294_967_295)


@dataclass
class InspectConfig:
    """``action=inspect``: what a checkpoint holds."""

    verify: bool = described(False, "read every file and compare its checksum")


@dataclass
class TuneConfig:
    """The search of ``action=tune``."""

    objective: str = described(
        "throughput",
        "throughput: samples/s at train.global_batch; latency: the shortest step, global batch left to the search",
        choices=("throughput", "latency"),
    )
    max_plans: int = described(40, "plans to make at most; each takes seconds", at_least=1, at_most=100_000)


@dataclass
class FigureConfig:
    """``action=figure``: a figure of the FSDP paper, predicted beside published (docs/paper_figures.md)."""

    name: str | None = described(
        None, "the figure, as the paper numbers it; experiment=paper/fig7b sets it", choices=FIGURES
    )


@dataclass
class Config(RecipeConfig):
    """One composed config."""

    action: str = described("train", "what to do", choices=ACTIONS)
    plugins: list[str] = described([], "Python files that register a user's own models, data or optimizers")
    cluster: ClusterConfig = described(ClusterConfig, "how ranks come to be")
    sweep: SweepConfig = described(SweepConfig, "sweeps")
    tune: TuneConfig = described(TuneConfig, "the search of action=tune")
    figure: FigureConfig = described(FigureConfig, "the figure of action=figure")
    inspect: InspectConfig = described(InspectConfig, "what a checkpoint holds")
