"""The important facts of a checked config for people: ranks, batches, parameters, bytes. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.schema import Config
from recipes.schema.derived import micro_batch, num_micro_batches, replicate_groups, shard_groups, sharding_factor
from recipes.sizes import DTYPE_BYTES, ModelSize, UnknownSize, expected_facts, model_size

STATE_COPIES = {"adamw": 2, "sgd": 1, "lamb": 2}  # tensors of the master dtype beside parameter and gradient
MAX_ROWS = 8  # of a rank table


@dataclass(frozen=True)
class Facts:
    """Numbers of one run. ``size`` is None, and ``unknown`` says why, where only the data or the model itself knows."""

    world_size: int
    factor: int
    micro_batch: int
    num_micro_batches: int
    master_dtype: str
    size: ModelSize | None
    unknown: str = ""

    @property
    def shard_bytes(self) -> int | None:
        """Bytes of one rank's parameters that the engine manages, in the dtype in which they are kept."""
        return None if self.size is None else DTYPE_BYTES[self.master_dtype] * self.size.shard_numel(self.factor)


def facts_of(config: Config) -> Facts:
    world_size = config.cluster.num_nodes * config.cluster.nproc_per_node
    size: ModelSize | None = None
    unknown = ""
    try:
        size = model_size(config.model, expected_facts(config.model, config.data))
    except UnknownSize as reason:
        unknown = str(reason)
    return Facts(
        world_size=world_size,
        factor=sharding_factor(config.sharding, world_size, config.cluster.nproc_per_node),
        micro_batch=micro_batch(config.train, world_size),
        num_micro_batches=num_micro_batches(config.train, world_size),
        master_dtype=config.precision.master_dtype,
        size=size,
        unknown=unknown,
    )


def summary(config: Config, choices: dict[str, str]) -> str:
    """The text of ``action=check``."""
    facts = facts_of(config)
    lines = [
        ("presets", " ".join(f"{group}={name}" for group, name in choices.items())),
        ("ranks", _ranks(config, facts)),
        ("sharding", _sharding(config, facts)),
        *_rank_table(facts),
        ("precision", _precision(config)),
        ("limiter", _limiter(config)),
        ("batch", _batch(config, facts)),
        ("steps", _steps(config)),
        ("data", f"{config.data.kind}, {config.data.eval_fraction:g} held out"),
        ("optimizer", f"{config.optimizer.kind}, lr {config.optimizer.lr:g}, {config.scheduler.kind}"),
        *_sizes(config, facts),
    ]
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in lines)


def _ranks(config: Config, facts: Facts) -> str:
    cluster = config.cluster
    where = f"{_count(cluster.num_nodes, 'host')} x {_count(cluster.nproc_per_node, 'rank')}"
    return f"W = {facts.world_size}: {where}, cluster {cluster.kind}, device {cluster.device}"


def _sharding(config: Config, facts: Facts) -> str:
    sharding = config.sharding
    kept = "RAF (freed after forward)" if sharding.reshard_after_forward else "NRAF (kept until backward)"
    prefetch = "on" if sharding.backward_prefetch else "off"
    return f"F = {facts.factor}, {kept}, units {sharding.units}, backward prefetch {prefetch}"


def _rank_table(facts: Facts) -> list[tuple[str, str]]:
    """Rows share one copy of the parameters, columns hold the same shard."""
    rows = shard_groups(facts.world_size, facts.factor)
    columns = replicate_groups(facts.world_size, facts.factor)
    lines = [("groups", f"{_count(len(rows), 'sharding group')} (all-gather, reduce-scatter): {_listed(rows)}")]
    if len(rows) > 1:
        lines.append(("", f"{_count(len(columns), 'replication group')} (all-reduce of shards): {_listed(columns)}"))
    return lines


def _precision(config: Config) -> str:
    precision = config.precision
    scaler = ", loss scaler" if precision.grad_scaler else ""
    master = "" if precision.master_dtype == "float32" else f", weights kept in {precision.master_dtype}"
    dtypes = f"compute {precision.param_dtype}, reduce {precision.reduce_dtype}, buffers {precision.buffer_dtype}"
    return f"{dtypes}{master}{scaler}"


def _limiter(config: Config) -> str:
    limiter = config.rate_limiter
    return limiter.kind if limiter.kind == "unlimited" else f"{limiter.kind}, {limiter.max_inflight} gathers in flight"


def _batch(config: Config, facts: Facts) -> str:
    ranks, forwards = _count(facts.world_size, "rank"), _count(facts.num_micro_batches, "micro-batch")
    return f"{config.train.global_batch} samples a step = {facts.micro_batch} x {ranks} x {forwards}"


def _steps(config: Config) -> str:
    train = config.train
    every = f"every {train.eval_every} steps and at the end" if train.eval_every else "at the end"
    evaluation = f"evaluation of {train.eval_samples} samples {every}" if train.eval_samples else "no evaluation"
    return f"{train.steps}, {evaluation}"


def _sizes(config: Config, facts: Facts) -> list[tuple[str, str]]:
    if facts.size is None:
        return [("model", f"{config.model.kind}; parameters: {facts.unknown}")]
    size = facts.size
    lines = [("model", f"{config.model.kind}, {size.numel:,} parameters{_provenance(config)}")]
    if size.tables_numel:
        each = size.tables_bytes / facts.world_size
        text = f"{size.tables_numel:,} more in embedding tables, {_bytes(each)} a rank"
        lines.append(("tables", text))
    if config.sharding.units == "blocks":
        lines.append(
            ("units", ", ".join(f"{unit.count} {unit.name} of {unit.numel:,}" for unit in size.units if unit.count))
        )
    elif config.sharding.units == "root":
        lines.append(("units", f"1 of {size.numel:,}"))
    else:
        lines.append(
            ("units", f"modules of at least {config.sharding.min_unit_numel:,}: found when the model is built")
        )
    shard = facts.shard_bytes or 0
    copies = 2 + STATE_COPIES.get(config.optimizer.kind, 0)
    whole = f"{_bytes(shard * copies)} with gradients and optimizer state"
    what = f"{_bytes(shard)} of {facts.master_dtype} parameters, {whole}"
    lines.append(("a rank holds", what))
    return lines


def _provenance(config: Config) -> str:
    """Where the count comes from, as the preset says it; without saying the count again."""
    words = [part for part in config.model.provenance.split("; ") if not part.endswith(" parameters")]
    return f" ({'; '.join(words)})" if words and words != [""] else ""


def _listed(groups: list[list[int]]) -> str:
    shown = " ".join(_group(group) for group in groups[:MAX_ROWS])
    return shown + (f" ... {_group(groups[-1])}" if len(groups) > MAX_ROWS else "")


def _group(ranks: list[int]) -> str:
    if len(ranks) <= MAX_ROWS:
        return "[" + " ".join(map(str, ranks)) + "]"
    return f"[{ranks[0]} {ranks[1]} ... {ranks[-1]}]"


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


def _bytes(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
