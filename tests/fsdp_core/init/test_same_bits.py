"""One seed, one set of bits: eager, deferred whole, deferred unit by unit in any order."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_core.init import (
    deferred_init,
    is_deferred,
    materialize,
    materialize_unit,
    recording_digest,
    seeded_init,
    stream_unit,
)

SEED = 11


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5, bias=False), nn.LayerNorm(5))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, batch_first=True)
    return nn.TransformerEncoder(layer, 2)  # deep-copies the layer


def recurrent_and_norms() -> nn.Module:
    return nn.ModuleDict(
        {
            "lstm": nn.LSTM(3, 4, num_layers=2, bidirectional=True),
            "bn": nn.BatchNorm1d(3),
            "embed": nn.Embedding(5, 3, padding_idx=1),
            "conv": nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        }
    )


def every_initialiser() -> nn.Module:
    module = nn.Module()
    init = nn.init
    for name, fill in {
        "xavier_u": init.xavier_uniform_,
        "xavier_n": init.xavier_normal_,
        "kaiming_n": init.kaiming_normal_,
        "orthogonal": init.orthogonal_,
        "trunc_wide": init.trunc_normal_,
        "trunc_narrow": lambda w: init.trunc_normal_(w, std=1.0, a=2.0, b=3.0),
        "sparse": lambda w: init.sparse_(w, 0.5),
        "eye": init.eye_,
        "after": init.normal_,  # its position must not depend on how often a rejection loop went round
    }.items():
        module.register_parameter(name, nn.Parameter(fill(torch.empty(8, 6))))
    module.dirac = nn.Parameter(init.dirac_(torch.empty(4, 4, 3)))
    return module


def views_and_writes_in_place() -> nn.Module:
    module = nn.Module()
    flat = torch.empty(24).normal_()
    module.left = nn.Parameter(flat[:12].view(3, 4))
    module.right = nn.Parameter(flat[12:].view(4, 3).t())
    with torch.no_grad():
        module.left[1:].mul_(2.0)
        module.right.data[:, 0] = module.left[:, 1]
        module.left[module.left > 0.5] = 0.25
        module.left.clamp_(min=-1.0)
    module.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())
    module.register_buffer("table", torch.arange(5).float().unsqueeze(0).expand(2, -1))
    module.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64).conj())
    return module


def moved_and_cast() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(torch.bfloat16)
    module[0].weight.data = torch.randn(5, 3, dtype=torch.float64)
    module[1].weight.data = module[1].weight.data.t().contiguous().float()
    module[1].half()
    return module


def values_steer_the_build() -> nn.Module:
    rates = [float(rate) for rate in torch.linspace(0, 0.3, 4)]
    first = nn.Linear(4, 4)
    width = 3 if first.weight.norm().item() > 1e-9 else 9
    second = nn.Linear(4, width)
    with torch.no_grad():
        while second.weight.abs().max() > 0.1:
            second.weight.mul_(0.5)
        if not torch.allclose(second.weight, torch.zeros(())):
            second.bias.fill_(first.weight.sum().tolist())
        first.bias[first.bias > 0] = 1.0
        second.bias[0] = float(np.asarray(first.bias.detach()).max())
    return nn.Sequential(first, second, *(nn.Dropout(rate) for rate in rates))


def numbers_from_python_and_numpy() -> nn.Module:
    module = nn.Linear(3, 3)
    scratch = np.empty((3, 3), dtype=np.float32)
    scratch[:] = np.random.standard_normal((3, 3))
    module.weight.data.copy_(torch.from_numpy(scratch))
    scratch[:] = 0.0
    nn.init.constant_(module.bias, random.random())
    return module


def own_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    module = nn.Linear(4, 4)
    nn.init.normal_(module.weight, generator=generator)
    nn.init.uniform_(module.bias, generator=generator)
    return module


def left_unwritten() -> nn.Module:
    module = nn.Module()
    module.raw = nn.Parameter(torch.empty(1000))
    module.also = nn.Parameter(torch.empty_like(module.raw).new_empty(10))
    return module


def reparametrised() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
        nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
    )


class ReadsAcrossUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 5)
        self.b = nn.Linear(5, 4)
        self.b.scale = nn.Parameter(self.a.weight.norm(dim=1))
        with torch.no_grad():
            self.a.weight.mul_(3.0)  # after it was read: the scale keeps the earlier norm


def default_dtype_changes() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    finally:
        torch.set_default_dtype(torch.float32)


def through_the_meta_device() -> nn.Module:
    with torch.device("meta"):
        module = nn.Linear(4, 3)
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    return module


BUILDS: dict[str, Callable[[], nn.Module]] = {
    f.__name__: f
    for f in (
        mlp,
        transformer,
        recurrent_and_norms,
        every_initialiser,
        views_and_writes_in_place,
        moved_and_cast,
        values_steer_the_build,
        numbers_from_python_and_numpy,
        own_generator,
        left_unwritten,
        reparametrised,
        ReadsAcrossUnits,
        default_dtype_changes,
        through_the_meta_device,
    )
}


def eager(build: Callable[[], nn.Module], seed: int = SEED) -> nn.Module:
    with seeded_init(seed):
        return build()


def deferred(build: Callable[[], nn.Module], seed: int = SEED) -> nn.Module:
    with seeded_init(seed):
        return deferred_init(build)


def assert_same(left: nn.Module, right: nn.Module) -> None:
    mine, other = left.state_dict(), right.state_dict()
    assert list(mine) == list(other)
    for name, value in mine.items():
        assert value.dtype == other[name].dtype, name
        assert value.stride() == other[name].stride(), name
        assert torch.equal(value, other[name]), name
    kinds = [(n, p.requires_grad, type(p)) for n, p in left.named_parameters()]
    assert kinds == [(n, p.requires_grad, type(p)) for n, p in right.named_parameters()]


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_deferred_equals_eager(build: Callable[[], nn.Module]) -> None:
    module = deferred(build)
    assert is_deferred(module) or build is numbers_from_python_and_numpy
    assert_same(materialize(module), eager(build))
    assert not is_deferred(module)


@pytest.mark.parametrize("reverse", [False, True], ids=["in_order", "reversed"])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_order_of_units_does_not_matter(build: Callable[[], nn.Module], reverse: bool) -> None:
    module = deferred(build)
    parts = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
    for part in reversed(parts) if reverse else parts:
        materialize(module, only=part)
    assert_same(materialize(module), eager(build))


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_tensor_by_tensor_without_touching_the_module(build: Callable[[], nn.Module]) -> None:
    module = deferred(build)
    expected = eager(build).state_dict(keep_vars=True)
    for name, tensor in reversed(module.state_dict(keep_vars=True).items()):
        if is_deferred(tensor):
            real = materialize_unit([tensor])[tensor]
            assert torch.equal(real, expected[name]), name


def test_another_seed_gives_other_bits() -> None:
    assert not torch.equal(eager(mlp, 1)[0].weight, eager(mlp, 2)[0].weight)
    assert not torch.equal(materialize(deferred(mlp, 1))[0].weight, materialize(deferred(mlp, 2))[0].weight)


def test_two_builds_in_one_context_differ_and_equal_eager() -> None:
    with seeded_init(SEED):
        first, second = mlp(), mlp()
    with seeded_init(SEED):
        one, two = deferred_init(mlp), deferred_init(mlp)
    assert_same(materialize(two), second)
    assert_same(materialize(one), first)
    assert not torch.equal(first[0].weight, second[0].weight)


def test_random_state_is_left_alone() -> None:
    def states() -> list[object]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]

    before = states()
    materialize(deferred(values_steer_the_build))
    eager(every_initialiser)
    assert states() == before


def test_without_a_context_the_default_generator_decides() -> None:
    torch.manual_seed(3)
    first = materialize(deferred_init(mlp))
    second = materialize(deferred_init(mlp))
    torch.manual_seed(3)
    assert_same(materialize(deferred_init(mlp)), first)
    assert not torch.equal(first[0].weight, second[0].weight)


def test_materialising_inside_the_context_draws_nothing_from_it() -> None:
    with seeded_init(SEED):
        first = materialize(deferred_init(every_initialiser))
        second = mlp()
    with seeded_init(SEED):
        assert_same(first, every_initialiser())
        assert_same(second, mlp())


def test_operations_after_the_build_are_recorded() -> None:
    def restyle(module: nn.Module) -> nn.Module:
        module.to(torch.bfloat16)
        module[0].weight.data.mul_(2)
        return module

    assert_same(materialize(restyle(deferred(mlp))), restyle(eager(mlp)))


def test_deepcopy_of_a_deferred_module_is_independent() -> None:
    module = deferred(mlp)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert_same(materialize(module), eager(mlp))
    assert not materialize(twin)[0].weight.any()


def test_digest_is_equal_for_equal_recordings_only() -> None:
    digest = recording_digest(deferred(mlp))
    assert digest == recording_digest(deferred(mlp))
    assert digest != recording_digest(deferred(mlp, seed=2))
    assert digest != recording_digest(deferred(lambda: nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))))


def test_stream_hands_over_each_tensor_once() -> None:
    module = deferred(transformer)
    wanted = list(module.parameters())
    seen = [name for name, _ in stream_unit(wanted)]
    assert len(seen) == len(wanted)
    assert {id(t) for t in seen} == {id(t) for t in wanted}
