"""Random builds: whatever a build does to its tensors, the replay of each, in any order, has the eager bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fsdp_core.init import deferred_init, is_deferred, materialize, materialize_unit, seeded_init

SIZE = 4  # every tensor is SIZE x SIZE, so that any may meet any


def _index_write(x: Tensor, y: Tensor) -> None:
    x[y > 0.5] = 0.25


def _branch(x: Tensor, y: Tensor) -> None:
    x.add_(1.0 if y.sum().item() > 0 else -1.0)


def _move(x: Tensor, y: Tensor) -> None:
    x.data = y.data if y.dtype == x.dtype else y.data.to(x.dtype)


MAKE: list[Callable[[], Tensor]] = [
    lambda: torch.empty(SIZE, SIZE),
    lambda: torch.zeros(SIZE, SIZE),
    lambda: torch.randn(SIZE, SIZE),
    lambda: torch.rand(SIZE, 2 * SIZE)[:, ::2],
    lambda: torch.tensor([[float(i * j) for i in range(SIZE)] for j in range(SIZE)]),
    lambda: torch.arange(SIZE * SIZE, dtype=torch.float32).view(SIZE, SIZE),
    lambda: torch.eye(SIZE).to(torch.bfloat16).float(),
]
DERIVE: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.t(),
    lambda x: x[:, :2].repeat(1, 2),
    lambda x: x.clone(),
    lambda x: x.detach(),
    lambda x: x.flip(0),
    lambda x: x.norm(dim=1, keepdim=True).expand(SIZE, SIZE),
    lambda x: torch.randn_like(x),
    lambda x: x.reshape(SIZE * SIZE)[torch.randperm(SIZE * SIZE)].view(SIZE, SIZE),
    lambda x: x.to(torch.float64).sin().float(),
    lambda x: x.as_strided((SIZE, SIZE), (1, SIZE)) if x.is_contiguous() else x,
]
CHANGE: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, y: x.normal_(),
    lambda x, y: x.uniform_(-1, 1),
    lambda x, y: x.copy_(y.clone()),
    lambda x, y: x.copy_(torch.tensor(0.75)),
    lambda x, y: x.mul_(0.5).add_(y.clone()),
    lambda x, y: x[1:].copy_(y[:-1].clone()),
    lambda x, y: x.t()[0].fill_(0.125),
    lambda x, y: x[2].bernoulli_(0.5),
    lambda x, y: nn.init.trunc_normal_(x, std=0.5),
    lambda x, y: nn.init.kaiming_uniform_(x),
    lambda x, y: nn.init.orthogonal_(x),
    lambda x, y: torch.add(y.clone(), 1, out=x),
    lambda x, y: torch._foreach_mul_([x], 2.0),
    _index_write,
    _branch,
    _move,
]

step = st.one_of(
    st.tuples(st.just("make"), st.sampled_from(range(len(MAKE))), st.just(0), st.just(0)),
    st.tuples(st.just("derive"), st.sampled_from(range(len(DERIVE))), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("change"), st.sampled_from(range(len(CHANGE))), st.integers(0, 30), st.integers(0, 30)),
)


@torch.no_grad()
def build(steps: list[tuple[str, int, int, int]]) -> nn.Module:
    tensors = [MAKE[2]()]
    for kind, which, first, second in steps:
        x, y = tensors[first % len(tensors)], tensors[second % len(tensors)]
        if kind == "make":
            tensors.append(MAKE[which]())
        elif kind == "derive":
            tensors.append(DERIVE[which](x))
        elif 0 not in x.stride():  # torch forbids writing to expanded tensors
            CHANGE[which](x, y)
    module = nn.Module()
    for index, tensor in enumerate(tensors):
        module.register_buffer(f"t{index}", tensor)
    return module


@given(
    st.lists(step, min_size=1, max_size=25),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_build_any_order(steps: list[tuple[str, int, int, int]], order: Any) -> None:
    with seeded_init(8):
        eager = build(steps)
    with seeded_init(8):
        deferred = deferred_init(build, steps)
    with seeded_init(8):
        at_once = materialize(deferred_init(build, steps))
    expected = dict(eager.named_buffers(remove_duplicate=False))
    names = list(expected)
    for name in names:
        assert torch.equal(getattr(at_once, name), expected[name]), name
    order.shuffle(names)
    for name in names[: len(names) // 2]:  # one by one, each from nothing
        tensor = getattr(deferred, name)
        if is_deferred(tensor):
            assert torch.equal(materialize_unit([tensor])[tensor], expected[name]), name
    for name in names:
        tensor = getattr(deferred, name)
        if is_deferred(tensor):
            materialize(deferred, only=[tensor])
    for name, value in expected.items():
        got = getattr(deferred, name)
        assert torch.equal(got, value), name
        assert got.stride() == value.stride(), name
    assert sharing(deferred) == sharing(eager)
    assert sharing(at_once) == sharing(eager)


def sharing(module: nn.Module) -> list[int]:
    """For each buffer the first one that lies in the same memory."""
    storages = [b.untyped_storage()._cdata for _, b in module.named_buffers(remove_duplicate=False)]
    return [storages.index(storage) for storage in storages]
