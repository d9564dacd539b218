"""What hypothesis draws: a tree, the engine's settings, and a few steps of training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from tests.fsdp_core.properties.trees import LEAVES, PARENTS, Node, Tree


@dataclass(frozen=True)
class Settings:
    """See ``fsdp_core.fully_shard``. max_inflight 0: unlimited. precision: "" | "compute" | "reduce" (see run.py)."""

    factor: int
    reshard_after_forward: bool = True
    backward_prefetch: bool = True
    forward_prefetch: bool = False
    max_inflight: int = 2
    gather_buffers: str = "pooled"
    wire: str = "auto"
    cpu_offload: bool = False
    precision: str = ""
    is_wrapped: bool = False
    is_early: bool = False  # collect every gradient as soon as it is complete, not just large ones


@dataclass(frozen=True)
class Step:
    """micro_batches: for each, is its gradient communicated (the last one's always is).

    clears_after_first: zero_grad behind the first micro-batch. evaluates: a forward without gradients goes before.
    """

    micro_batches: tuple[bool, ...] = (True,)
    clears_after_first: bool = False
    evaluates: bool = False
    clips: bool = False


@dataclass(frozen=True)
class Example:
    world_size: int
    tree: Tree
    settings: Settings
    steps: tuple[Step, ...]
    optimizer: str = "sgd"
    face: str = "named"


_sizes = st.integers(1, 7)
_leaves = st.builds(Node, st.sampled_from(LEAVES), _sizes, st.booleans(), st.booleans())


def _parents(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    some = st.lists(children, min_size=1, max_size=3).map(tuple)
    return st.builds(Node, st.sampled_from(PARENTS), _sizes, st.booleans(), st.booleans(), some)


_nodes = st.recursive(_leaves, _parents, max_leaves=5)
trees = st.builds(Tree, st.integers(1, 6), st.lists(_nodes, min_size=1, max_size=3).map(tuple))


def settings_for(world_size: int) -> st.SearchStrategy[Settings]:
    factors = [factor for factor in range(1, world_size + 1) if world_size % factor == 0]
    return st.builds(
        Settings,
        st.sampled_from(factors[::-1]),
        reshard_after_forward=st.booleans(),
        backward_prefetch=st.booleans(),
        forward_prefetch=st.booleans(),
        max_inflight=st.sampled_from([2, 1, 3, 0]),
        gather_buffers=st.sampled_from(["pooled", "allocator"]),
        wire=st.sampled_from(["auto", "collectives", "gloo_p2p"]),
        cpu_offload=st.sampled_from([False, False, False, True]),
        precision=st.sampled_from(["", "", "compute", "reduce"]),
        is_wrapped=st.booleans(),
        is_early=st.booleans(),
    )


_steps = st.builds(
    Step,
    st.lists(st.booleans(), min_size=0, max_size=2).map(lambda synced: (*synced, True)),
    st.sampled_from([False, False, True]),
    st.sampled_from([False, False, True]),
    st.booleans(),
)


def examples(world_size: int) -> st.SearchStrategy[Example]:
    return st.builds(
        Example,
        st.just(world_size),
        trees,
        settings_for(world_size),
        st.lists(_steps, min_size=1, max_size=3).map(tuple),
        st.sampled_from(["sgd", "adamw"]),
        st.sampled_from(["named", "flat"]),
    )


def compute_dtype(example: Example) -> torch.dtype:
    return torch.float32 if example.settings.precision else example.tree.dtype
