"""Optimizer, schedule, the loop, loggers, checkpoints, hardware, run."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.schema.fields import MISSING, described


@dataclass
class OptimizerConfig:
    """What every optimizer has."""

    kind: str = described(MISSING, "registry name of the optimizer")
    lr: float = described(MISSING, "peak learning rate", above=0)
    weight_decay: float = described(0.0, "decoupled where the optimizer is (adamw)", at_least=0)
    no_decay: list[str] = described(
        ["bias", "norm", "ln_", "layer_norm", "position"], "parameters whose name contains one of these are not decayed"
    )


@dataclass
class AdamWConfig(OptimizerConfig):
    """Decoupled weight decay Adam."""

    kind: str = described("adamw", "adamw")
    betas: list[float] = described([0.9, 0.95], "decay of the two moments", at_least=0, below=1)
    eps: float = described(1e-8, "added to the denominator", above=0)
    kernels: str = described(
        "fused",
        "fused: one pass over a shard; explicit: one operation after the other, as PyTorch 2.0 did by default, which "
        "moves almost three times the bytes",
        choices=("fused", "explicit"),
    )


@dataclass
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent."""

    kind: str = described("sgd", "sgd")
    momentum: float = described(0.0, "heavy-ball momentum", at_least=0, below=1)
    nesterov: bool = described(False, "Nesterov's variant; needs momentum")


@dataclass
class LAMBConfig(OptimizerConfig):
    """Layer-wise adaptive moments for large batches (arXiv 1904.00962), exact on shards."""

    kind: str = described("lamb", "lamb")
    betas: list[float] = described([0.9, 0.999], "decay of the two moments", at_least=0, below=1)
    eps: float = described(1e-6, "added to the denominator", above=0)


@dataclass
class AdafactorConfig(OptimizerConfig):
    """Adafactor with factored second moments (arXiv 1804.04235), exact on shards."""

    kind: str = described("adafactor", "adafactor")
    beta2_decay: float = described(-0.8, "exponent of the second moment's decay over steps", at_most=0)


@dataclass
class SchedulerConfig:
    """Learning rate over steps: linear warm-up, then a shape down to ``min_lr_ratio`` of the peak at the last step."""

    kind: str = described("cosine", "shape after warm-up", choices=("cosine", "linear", "constant"))
    warmup_steps: int | None = described(0, "steps of linear warm-up; null: a twentieth of train.steps", at_least=0)
    min_lr_ratio: float = described(0.1, "last learning rate over the peak", at_least=0, at_most=1)


@dataclass
class EarlyStopConfig:
    """Stop when the held-out loss no longer improves. Off when patience is null."""

    patience: int | None = described(None, "evaluations without improvement before stopping", at_least=1)
    min_delta: float = described(0.0, "smallest improvement that counts", at_least=0)


LOSS_POLICIES = ("stop", "skip", "warn")


@dataclass
class LossSpikeConfig:
    """A loss far above the recent ones (docs/faults.md has the formula). Off when deviations is null."""

    deviations: float | None = described(None, "deviations above the median that make a spike; 6 is usual", above=0)
    window: int = described(64, "steps that the median and the deviation are taken from", at_least=8)
    steps: int = described(3, "with action=stop: steps in a row that a spike must last", at_least=1)
    action: str = described("warn", "what to do: stop, skip (leave the update out) or warn", choices=LOSS_POLICIES)


@dataclass
class TrainConfig:
    """The loop. Accumulation is global_batch / (micro_batch x W)."""

    steps: int = described(MISSING, "optimizer steps", at_least=1, at_most=10**12)
    global_batch: int = described(MISSING, "samples per step, over all ranks and micro-batches", at_least=1)
    micro_batch: int | None = described(
        None, "samples of one forward on one rank; null: global_batch / W, no accumulation", at_least=1
    )
    accumulate_with_communication: bool = described(
        False, "reduce gradients in every micro-batch (less memory) instead of only the last"
    )
    clip_norm: float | None = described(1.0, "largest global gradient norm; null: no clipping", above=0)
    activation_checkpointing: bool = described(False, "recompute each unit's activations in backward")
    compile: bool = described(False, "torch.compile each unit")
    log_every: int = described(10, "steps between progress lines (metrics.jsonl gets every step)", at_least=1)
    eval_every: int | None = described(None, "steps between evaluations; null: only at the end", at_least=1)
    eval_samples: int = described(
        256, "held-out samples of one evaluation, over all ranks; 0: no evaluation", at_least=0
    )
    on_bad_loss: str = described(
        "stop",
        "when a loss is NaN or infinite: stop, skip (leave the update out on all ranks) or warn",
        choices=LOSS_POLICIES,
    )
    loss_spike: LossSpikeConfig = described(LossSpikeConfig, "when a loss is far above the recent ones")
    max_skipped: int = described(10, "updates left out in a row that end the run", at_least=1)
    early_stop: EarlyStopConfig = described(EarlyStopConfig, "stop when the held-out loss no longer improves")
    profile_steps: list[int] | None = described(
        None, "[first, last): steps recorded by the profiler into the run folder"
    )
    trace: bool = described(False, "write the engine's event log of the profiled steps (or of the first three)")
    check_schedule: bool = described(False, "check after every step that the engine's order of work was right")


@dataclass
class JsonlLoggerConfig:
    """metrics.jsonl in the run folder: always written, one line per step."""


@dataclass
class WandbLoggerConfig:
    """Weights & Biases; offline works without an account."""

    project: str = described("fsdp-launcher", "project name")
    entity: str | None = described(None, "team or user")
    mode: str = described("offline", "online needs WANDB_API_KEY or a login", choices=("online", "offline", "disabled"))
    tags: list[str] = described([], "tags of the run")
    notes: str | None = described(None, "free text")


@dataclass
class TensorboardLoggerConfig:
    """Event files under the run folder (extra: tensorboard)."""


@dataclass
class LoggerConfig:
    """Which loggers are on; select with ``logger=[jsonl,wandb]``."""

    jsonl: JsonlLoggerConfig | None = described(None, "metrics.jsonl, always on")
    wandb: WandbLoggerConfig | None = described(None, "Weights & Biases")
    tensorboard: TensorboardLoggerConfig | None = described(None, "TensorBoard event files")


@dataclass
class CheckpointConfig:
    """Saving and resuming."""

    every: str | None = described(None, "steps between checkpoints, or minutes (10min); null: none")
    keep_last: int = described(2, "newest checkpoints that stay", at_least=1)
    keep_every: int | None = described(None, "checkpoints of every such step stay for good; null: none", at_least=1)
    keep_best: int = described(0, "checkpoints with the lowest held-out loss that stay", at_least=0)
    asynchronous: bool = described(True, "training goes on while a copy is written (host memory: this rank's share)")
    on_error: str = described(
        "stop", "where a save fails (a full disk, say): stop the run, or go on without it", choices=("stop", "continue")
    )
    resume: str = described(
        "auto",
        "auto: go on from run.dir's newest whole checkpoint, start where there is none; never: start over; or a path",
    )
    allow_drift: bool = described(
        False, "go on although the config changes numbers: learning rate, seed, precision, data, ..."
    )


@dataclass
class HardwareConfig:
    """What the accelerator can do; null where unknown (MFU is then null)."""

    name: str = described("unknown", "name of the profile")
    device: str | None = described(None, "what it describes; null: whatever a run finds", choices=("cuda", "cpu"))
    peak_flops_float32: float | None = described(None, "FLOP/s of one device in float32", above=0)
    peak_flops_bfloat16: float | None = described(None, "FLOP/s of one device in bfloat16, dense", above=0)
    peak_flops_float16: float | None = described(None, "FLOP/s of one device in float16, dense", above=0)
    memory_bytes: int | None = described(None, "memory of one device, in bytes", at_least=1)
    memory_bytes_per_s: float | None = described(None, "memory bandwidth of one device, bytes/s", above=0)
    devices_per_host: int | None = described(None, "devices of one host", at_least=1)
    intra_host_bytes_per_s: float | None = described(
        None, "bandwidth between devices of a host, bytes/s and direction", above=0
    )
    cross_host_bytes_per_s: float | None = described(None, "network bandwidth of one host, bytes/s", above=0)
    usable_memory_bytes: int | None = described(
        None, "what the caching allocator may take; null: 94 % of memory_bytes", at_least=1
    )
    compute_efficiency: float | None = described(
        None, "part of the peak that large matrix products reach; null: assumed", above=0, at_most=1
    )
    memory_efficiency: float | None = described(
        None, "part of the memory bandwidth that elementwise kernels reach; null: assumed", above=0, at_most=1
    )
    intra_efficiency: float | None = described(
        None, "part of the host's inner bandwidth that collectives reach; null: assumed", above=0, at_most=1
    )
    cross_efficiency: float | None = described(
        None, "part of the network bandwidth that collectives reach; null: assumed", above=0, at_most=1
    )
    intra_reduce_ratio: float | None = described(
        None, "rate of reduce-scatters and all-reduces inside a host over that of all-gathers; null: 1", above=0
    )
    cross_reduce_ratio: float | None = described(None, "the same between hosts; null: 1", above=0)
    intra_step_s: float | None = described(None, "latency of a ring's step inside a host; null: assumed", at_least=0)
    cross_step_s: float | None = described(None, "latency of a ring's step between hosts; null: assumed", at_least=0)
    launch_s: float | None = described(None, "host time to issue one operation; null: assumed", at_least=0)
    kernel_s: float | None = described(None, "time of the shortest kernel; null: assumed", at_least=0)
    overlap_slowdown: float | None = described(
        None, "computing takes this much longer while a collective runs beside it; null: assumed", at_least=0
    )
    gathers_wait_in_forward: float = described(
        0.0,
        "a hypothesis: the part of a gather that forward cannot hide. 1: it begins when computing has come to it; "
        "0: as early as it can",
        at_least=0,
        at_most=1,
    )


@dataclass
class RunConfig:
    """Identity and reproducibility of the run."""

    name: str | None = described(None, "short name in the folder's name and the loggers; null: the model preset's")
    dir: str | None = described(None, "run folder; null: a new one under runs/; a path: this run, new or continued")
    seed: int = described(0, "seed of initialisation, dropout and data order", at_least=0, below=2**63)
    deterministic: bool = described(
        False, "only deterministic kernels (may be slower; an operation without one is an error)"
    )
    log_level: str = described("info", "least level in the logs", choices=("debug", "info", "warning", "error"))
    plan: bool = described(
        True, "plan the run when it is over and compare: step time, memory, bytes (plan.json, docs/plan.md)"
    )
