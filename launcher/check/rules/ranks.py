"""Rules about ranks: W and F, hosts, devices, the batch's arithmetic, environment variables."""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher import time_limit
from launcher.check.about import About
from launcher.check.rules.rule import Rules
from launcher.errors import Problem
from launcher.schema import Config
from recipes.schema.derived import divisors, sharding_factor

RULES = Rules()
ON_RANKS = ("train", "eval", "generate", "calibrate")  # actions that start ranks, or join them
ON_PAPER = ("plan", "tune", "figure")  # their hosts need not be there
WITHOUT_STEPS = ("eval", "generate", "export", "inspect")
WORLD = ("cluster.num_nodes", "cluster.nproc_per_node")
OURS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def world_size(config: Config) -> int:
    return config.cluster.num_nodes * config.cluster.nproc_per_node


def _world_in_words(config: Config) -> str:
    nodes, ranks = config.cluster.num_nodes, config.cluster.nproc_per_node
    return f"W = {ranks}" if nodes == 1 else f"W = {nodes} x {ranks} = {nodes * ranks}"


def _world_keys(config: Config) -> tuple[str, ...]:
    """The keys that made W what it is."""
    return WORLD if config.cluster.num_nodes > 1 else ("cluster.nproc_per_node",)


@RULES.reading("cluster.kind", "action", *WORLD)
def hosts(config: Config, about: About) -> Iterator[Problem]:
    nodes = config.cluster.num_nodes
    if config.cluster.kind == "local" and nodes > 1 and config.action not in ON_PAPER:
        ranks = config.cluster.nproc_per_node
        yield about.problem(
            "cluster.num_nodes",
            "more nodes than this machine: cluster=local starts ranks on one host",
            got=nodes,
            expected="1 with cluster=local",
            remedy=f"on each host: torchrun --nnodes {nodes} --nproc-per-node {ranks} --rdzv-backend c10d "
            "--rdzv-endpoint FIRST_HOST:29400 -m launcher ...",
            also=("cluster.kind",),
        )


@RULES.reading("cluster.kind", "action")
def joining(config: Config, about: About) -> Iterator[Problem]:
    if config.cluster.kind == "torchrun" and config.action in ON_RANKS and about.is_typed and about.joined is None:
        yield about.problem(
            "cluster.kind",
            "there are no ranks to join: RANK and WORLD_SIZE are not set",
            got="torchrun",
            remedy=f"torchrun --nproc-per-node {config.cluster.nproc_per_node} -m launcher ..., or cluster=local",
        )


@RULES.reading("cluster")
def joined_world(config: Config, about: About) -> Iterator[Problem]:
    """Who started the ranks decides how many there are; another number on the command line is a misunderstanding."""
    if about.joined is None:
        return
    for key, there in (
        ("cluster.num_nodes", about.joined.num_nodes),
        ("cluster.nproc_per_node", about.joined.local_world_size),
    ):
        asked = about.sources.text(key)
        if asked is not None and asked.strip() != str(there):
            yield Problem(
                "the ranks that exist are others than asked for",
                key,
                asked,
                f"command line: {key}={asked}",
                f"{there}, as the environment says (WORLD_SIZE={about.joined.world_size})",
                "leave it out: torchrun's --nnodes and --nproc-per-node decide, or srun's options",
            )


@RULES.reading("action", "sharding", *WORLD)
def factor(config: Config, about: About) -> Iterator[Problem]:
    """F divides W; ``hybrid`` on one host has no second level, so it wants F by name."""
    if config.action in ("export", "inspect"):
        return
    sharding, ranks = config.sharding, config.cluster.nproc_per_node
    world = world_size(config)
    if sharding.factor is None and sharding.default_factor == "host" and config.cluster.num_nodes == 1:
        between = [divisor for divisor in divisors(world) if 1 < divisor < world]
        yield about.problem(
            "sharding.factor",
            "hybrid sharding on a single host needs F by name: its default, the ranks of one host, is all of W",
            got="null",
            expected=f"a divisor of {_world_in_words(config)} between 1 and W: {', '.join(map(str, between))}"
            if between
            else f"more ranks than {_world_in_words(config)}",
            remedy=f"sharding.factor={between[0]}" if between else "cluster.nproc_per_node=4 sharding.factor=2",
            also=("sharding.default_factor",),
        )
        return
    chosen = sharding_factor(sharding, world, ranks)
    if world % chosen:
        yield about.problem(
            "sharding.factor",
            f"F does not divide {_world_in_words(config)}",
            got=chosen,
            expected=f"a divisor of W: {', '.join(map(str, divisors(world)))}",
            remedy=f"sharding.factor={max(divisor for divisor in divisors(world) if divisor <= chosen)}",
            also=_world_keys(config),
        )


@RULES.reading("action", "train.global_batch", "train.micro_batch", *WORLD)
def batches(config: Config, about: About) -> Iterator[Problem]:
    """global_batch = micro_batch x W x accumulation."""
    if config.action in WITHOUT_STEPS:
        return
    micro, world, total = config.train.micro_batch, world_size(config), config.train.global_batch
    step = world * (micro or 1)
    if total % step == 0:
        return
    words = f"micro_batch x W = {micro} x {world} = {step}" if micro else f"{_world_in_words(config)} ranks"
    below, above = total // step * step, (total // step + 1) * step
    choices = " or ".join(f"train.global_batch={choice}" for choice in (below, above) if choice)
    yield about.problem(
        "train.global_batch",
        f"the global batch cannot be shared evenly: {words} does not divide {total}",
        got=total,
        expected=f"a multiple of {step}",
        remedy=choices,
        also=("train.micro_batch", *_world_keys(config)),
    )


@RULES.reading("cluster.device", "cluster.kind", *WORLD)
def devices(config: Config, about: About) -> Iterator[Problem]:
    """GPUs that were asked for by name and are not there. (Another job step may show each rank only its own GPU.)"""
    if config.cluster.device != "cuda" or (config.cluster.kind != "local" and about.joined is None):
        return
    if config.action not in ON_RANKS and about.joined is None:
        return  # checking for another machine
    present, asked = about.gpus(), config.cluster.nproc_per_node
    if present >= asked or (about.joined is not None and present == 1):
        return
    yield about.problem(
        "cluster.device",
        f"{asked} GPUs are needed, one for each rank, and this machine shows {present}",
        got="cuda",
        remedy=f"cluster.nproc_per_node={present}"
        if present
        else "cluster.device=cpu, or look at CUDA_VISIBLE_DEVICES",
        also=("cluster.nproc_per_node",),
    )


@RULES.reading("sharding.wire", "cluster.device")
def wires(config: Config, about: About) -> Iterator[Problem]:
    if config.cluster.device == "cuda" and config.sharding.wire in ("gloo_p2p", "shared_memory"):
        yield about.problem(
            "sharding.wire",
            "this transport is for CPU ranks only",
            got=config.sharding.wire,
            expected="auto or collectives with cluster.device=cuda",
            remedy="sharding.wire=auto",
            also=("cluster.device",),
        )


@RULES.reading("cluster.time_limit")
def time_limits(config: Config, about: About) -> Iterator[Problem]:
    if config.cluster.time_limit is None:
        return
    try:
        time_limit.seconds_of(config.cluster.time_limit)
    except ValueError as error:
        yield about.problem(
            "cluster.time_limit",
            f"no time limit: {error}",
            got=config.cluster.time_limit,
            expected=time_limit.EXPECTED,
            remedy="cluster.time_limit=24:00:00",
        )


@RULES.reading("cluster.env")
def environment(config: Config, about: About) -> Iterator[Problem]:
    for name in config.cluster.env:
        key = f"cluster.env.{name}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield about.problem(
                key, "this is no name of an environment variable", got=name, remedy="cluster.env.NAME=VALUE"
            )
        elif name in OURS:
            yield about.problem(
                key,
                "the launcher sets this variable itself, per rank",
                got=config.cluster.env[name],
                remedy="leave it out",
            )
